"""Print the tables of ``docs/how-we-know`` from the files in ``figures``.

    python -m benchmarks.tables

The command rewrites each part of these pages that lies between ``<!-- table NAME -->`` and ``<!-- end -->``;
``make docs`` runs it too.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.machines import FIGURES

PAGES = Path(__file__).parent.parent / "docs" / "how-we-know"
MARKED = re.compile(r"<!-- table (\w+) -->\n[^<]*<!-- end -->")

BENCHMARKS = {
    "data_path": "speed of the data path, relative to torchvision's data set in a `DataLoader` (one thread)",
    "data_path_augmented": "the same with random crop and flip",
    "textbook": "samples per second of the whole baseline stage, relative to those of a textbook's script",
    "textbook_in_memory": "speed of the textbook's script on data in memory without `DataLoader`, over its usual speed",
    "beyond_memory_heavier": "speed of `small_cnn` on data of three times its memory, over its speed on data in memory",
    "beyond_memory": "the same with a net so light that the data path takes most of a step's time",
    "bare_loop": "steady throughput, relative to the barest hand-written loop",
    "tracking": "throughput with the live mirror to MLflow, relative to throughput without it",
    "nothing_to_do": "time of `dvc repro` with nothing to do, relative to the time of `dvc status`",
    "default_job": "time of the default job in a fresh clone after the installation, as a fraction of ten minutes",
    "own_job": "time of the bench of seven variants of ResNet-18, as a fraction of ten minutes",
    "own_script": "gain of gradient accumulation as a script's flag, relative to the gain as a variant of the same job",
    "turns": "spread of a round's A/A ratio with windows cut into turns, relative to the spread with uncut windows",
    "ledgers": "predicted peak memory of tensors, relative to the measured peak, in the worst of the configurations",
    "gpt_example": "time of the whole job of `examples/gpt`, as a fraction of 15 minutes",
    "evaluations": "memory that an evaluation of a sharded `gpt` adds to a process, over the model's parameters",
    "fixed_cost": "a stage's fixed time, relative to the time of `import torch`",
}  # fmt: skip
"""Name of a benchmark -> what its ratio means."""
MACHINES = ("amd-epyc-avx2-2-cores", "amd-epyc-avx-512-2-cores", "intel-r-xeon-r-processor-avx-512-2-cores")


def figures(name: str) -> Any:
    return json.loads((FIGURES / f"{name}.json").read_text(encoding="utf-8"))


def markdown(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heading, ["---"] * len(heading), *rows))


def between(low: float, high: float, form: str = ".2f") -> str:
    return f"{low:{form}} to {high:{form}}"


def settings(key: str) -> list[str]:
    """Return the numbers in a key of ``simulations.json``, such as "ratio 1.03, noise 0.02"."""
    ratio, *shares = re.findall(r"[\d.]+", key)
    return [ratio, *shares]


SHARES = ("coverage", "decided", "wrong", "untrusted")
"""What is simulated of a stopping rule, as shares of the benches."""


def settled() -> str:
    def cells(rule: Mapping[str, float]) -> list[str]:
        return [f"{rule['rounds']:.1f}", *(f"{rule[name]:.1%}" for name in SHARES)]

    heading = ["true ratio", "scatter of a round", "autocorrelation"]
    for rule in ("all 40 rounds", "until settled"):
        heading += [f"{rule}: rounds", "interval contains the true ratio", "decided", "decided wrongly", "not trusted"]
    rows = (
        [*settings(key), *cells(rules["all 40 rounds"]), *cells(rules["looks"])]
        for key, rules in figures("simulations")["looking"].items()
    )
    return markdown(heading, rows)


def aims() -> str:
    """Until a look decides within 40 rounds; or after 12 rounds without looks."""
    heading = ["rounds", "true ratio", "at most", "rounds until decided", "decided", "decided wrongly", "not trusted",
               "interval contains the true ratio", "half-width"]  # fmt: skip
    rows = []
    for key, rules in figures("simulations")["aims"].items():
        drawn, *numbers = key.rsplit(", ", 2)
        truth, most = settings(", ".join(numbers))
        rule = rules["looks"] if most == "40" else rules[f"all {most} rounds"]
        shares = [f"{rule[name]:.1%}" for name in ("decided", "wrong", "untrusted", "coverage")]
        number = f"{rule['rounds']:.1f}" if most == "40" else "no looks"
        rows.append([drawn, truth, most, number, *shares, f"{rule['half_width']:.3f}"])
    return markdown(heading, rows)


def kept() -> str:
    heading = ["bias", "scatter of the sessions' rounds", "ratio of the last: own", "all", "over all: own", "all"]
    rows = []
    for key, rules in figures("simulations")["kept"].items():
        bias, *noises = settings(key)
        cells = (f"{rule['half_width']:.4f} ({rule['coverage']:.1%})" for rule in rules.values())
        rows.append([bias, ", ".join(noises), *cells])
    return markdown(heading, rows)


def many() -> str:
    heading = ["variants", "true ratio of all", "a wrong one, each by itself", "a wrong one, together",
               "decided, each by itself", "decided, together", "rounds of a variant, each", "together"]  # fmt: skip
    rows = []
    for key, rules in figures("simulations")["many"].items():
        both = rules["each by itself"], rules["together"]
        shares = [f"{rule[name]:.1%}" for name in ("wrong", "decided") for rule in both]
        rows.append([*settings(key), *shares, *(f"{rule['rounds']:.1f}" for rule in both)])
    return markdown(heading, rows)


def drifting() -> str:
    shares = figures("simulations")["drifting"]
    cases: dict[str, list[str]] = {}
    for key, case in shares.items():
        arms, _, _ = key.rpartition(", ")
        cases.setdefault(arms, []).append(f"{case['held']:.0%}, {case['held_mean']:.0%} ({case['refused']:.0%})")
    numbers = dict.fromkeys(key.rpartition(", ")[2] for key in shares)
    return markdown(["correlation", "walk", *numbers], ([*settings(arms), *cells] for arms, cells in cases.items()))


def sides() -> str:
    heading = ["true ratio", "noise", "autocorrelation", "rounds", "untrusted", "of these, the side known",
               "of all, the side known", "wrong"]  # fmt: skip
    rows = []
    for key, case in figures("simulations")["sides"].items():
        ratio, *noise, rounds = settings(key)
        shares = (f"{case[name]:.1%}" for name in ("untrusted", "told_untrusted", "told"))
        rows.append([ratio, *(noise or ["recorded", ""]), rounds, *shares, str(case["wrong"])])
    return markdown(heading, rows)


def racing() -> str:
    heading = ["noise", "the best dropped", "found within 3%", "rounds", "a stopwatch is wrong"]
    cases = figures("simulations")["racing"].items()
    rows = [
        [*settings(key), *(f"{case[name]:.1%}" for name in ("dropped", "found")), f"{case['rounds']:.0f}",
         f"{case['stopwatch']:.1%}"]
        for key, case in cases
    ]  # fmt: skip
    return markdown(heading, rows)


def replays() -> str:
    heading = ["job", "candidates", "scatter", "rounds", "the best dropped", "front kept", "finalists within 3%",
               "intervals hold", "a stopwatch is wrong"]  # fmt: skip
    rows = []
    for job, of_job in figures("races")["jobs"].items():
        for factor, key in ((1, "as_recorded"), (2, "twice_the_scatter")):
            case = of_job[key]
            shares = (f"{case[name]:.1%}" for name in ("dropped", "front", "ends", "coverage", "stopwatch"))
            scatter = f"{factor * of_job['scatter']:.1%}"
            rows.append([job, str(case["candidates"]), scatter, f"{case['rounds']:.0f}", *shares])
    return markdown(heading, rows)


def seeds() -> str:
    heading = ["true difference, points", "deviation over seeds", "decided by three seeds", "same", "worse", "better",
               "seeds"]  # fmt: skip
    rows = []
    for key, case in figures("simulations")["seeds"].items():
        points, deviation = (part.split()[1] for part in key.split(", "))
        shares = [f"{case[name]:.1%}" for name in ("three", "same", "worse", "better")]
        rows.append([points, deviation, *shares, f"{case['seeds']:.1f}"])
    return markdown(heading, rows)


def alive() -> str:
    heading = ["true ratio", "scatter of a round", "scatter of processes", "rounds per process", "rounds until settled",
               "interval contains the true ratio", "decided", "decided wrongly", "not trusted"]  # fmt: skip
    rows = (
        [*settings(key), f"{case['rounds']:.1f}", *(f"{case[name]:.1%}" for name in SHARES)]
        for key, case in figures("simulations")["alive"].items()
    )
    return markdown(heading, rows)


def parts() -> str:
    arms = figures("parts-amd-epyc-avx-512-2-cores")["parts"]["default job"]["samples"]
    rows = []
    for part in next(iter(arms.values()))[0]:
        of_arms = ([statistics.median(costs[part][kind] for costs in samples) for kind in (0, 1)]
                   for samples in arms.values())  # fmt: skip
        rows.append([part, *(f"{wall:.2f} ({cpu:.2f})" for wall, cpu in of_arms)])
    return markdown(["part", *arms], rows)


def openings() -> str:
    arms = figures("parts-amd-epyc-avx-512-2-cores")["parts"]["openings"]["seconds_of_opening_turn_and_closing"]
    rows = (
        [arm, state, *(f"{statistics.median(values):.2f}" for values in zip(*samples, strict=True))]
        for arm, states in arms.items()
        for state, samples in states.items()
    )
    return markdown(["arm", "", "opening, s", "20 steps and the counted one, s", "closing, s"], rows)


def bias() -> str:
    heading = ["bias", "scatter of a round", "bias unseen by A/A", "wrong without widening", "wrong with widening"]
    rows = (
        [*settings(key), f"{case['unseen']:.0%}", f"{case['plain']:.1%}", f"{case['widened']:.1%}"]
        for key, case in figures("simulations")["equal_arms"].items()
    )
    return markdown(heading, rows)


def decided() -> str:
    heading = ["true ratio", "scatter of a round", "decided without widening", "decided with widening"]
    rows = (
        [*settings(key), f"{case['plain']:.1%}", f"{case['widened']:.1%}"]
        for key, case in figures("simulations")["decided"].items()
    )
    return markdown(heading, rows)


def sessions() -> str:
    shares = figures("simulations")["sessions"]
    pairs = (("0.06", "0.02"), ("0.11", "0.05"), ("0.02", "0.05"))

    def covered(number: int, pair: tuple[str, str], autocorrelation: str) -> str:
        key = "{} session(s) that differ by {}, noise {}, autocorrelation {}"
        return f"{shares[key.format(number, *pair, autocorrelation)]['coverage']:.0%}"

    heading = ["sessions", *(f"sessions differ by {apart}, rounds by {noise}" for apart, noise in pairs)]
    rows = (
        [str(number), *(f"{covered(number, pair, '0.0')} ({covered(number, pair, '0.6')})" for pair in pairs)]
        for number in (1, 2, 3, 5, 10)
    )
    return markdown(heading, rows)


def best() -> str:
    heading = ["", "true gain", "seeming gain of the best", "cross-validated gain", "interval contains the true gain"]
    rows = (
        [name, *(f"{case[key] - 1:.1%}" for key in ("truth", "seen", "told")), f"{case['coverage']:.1%}"]
        for name, case in figures("simulations")["best_of"].items()
    )
    return markdown(heading, rows)


def forecasts() -> str:
    heading = ["true ratio", "scatter of a round", "decided after the forecast rounds", "after twice as many"]
    rows = (
        [*settings(key), f"{case['by_as_many']:.0%}", f"{case['by_twice_as_many']:.0%}"]
        for key, case in figures("simulations")["forecasts"].items()
    )
    return markdown(heading, rows)


def levels() -> str:
    heading = ["machine", "settings", "variant", "between servers", "between processes", "between turns",
               "speed over the baseline's"]  # fmt: skip
    rows = []
    for name in ("amd-epyc-avx-512-2-cores", "amd-epyc-avx-512-1-cores", "intel-r-xeon-r-processor-avx-512-2-cores"):
        measured = figures(f"levels-{name}")
        for setting, case in measured["levels"].items():
            for variant, ratio in case["ratios"].items():
                deviations = [f"{deviation:.1%}" for deviation in ratio["deviations"].values()]
                rows.append([measured["machine"], setting, variant, *deviations, f"{ratio['throughput']:.2f}"])
    return markdown(heading, rows)


GATE = ["equal sides called worse", "equal sides not decided or untrusted (3)", "10% slower: found",
        "not decided or untrusted (3)", "passed"]  # fmt: skip


def gate_shares(case: Mapping[str, Any]) -> list[str]:
    def share(side: str, *starts: str) -> str:
        counts = case["outcomes"][side]
        return f"{sum(count for end, count in counts.items() if end.startswith(starts)) / case['trials']:.1%}"

    unclear = ("undecided", "untrusted")
    equal = [share("equal", "worse"), share("equal", *unclear)]
    return [*equal, share("slower", "worse"), share("slower", *unclear), share("slower", "passed")]


def gate_trials() -> str:
    measured = figures("gate-rates-amd-epyc-avx2-2-cores")
    rows = []
    for case in (*measured["rates"], measured["without_correlation"]):
        rule = ", without the rule on correlation" if case is measured["without_correlation"] else ""
        rows.append(
            [f"{case['rounds_per_trial']}{rule}", *(str(case[key]) for key in ("independent_blocks", "trials")),
             *gate_shares(case), str(case["mean_rounds"]["slower"]),
             f"{case['outcomes']['5%'].get('worse: throughput', 0) / case['trials']:.1%}"]
        )  # fmt: skip
    heading = ["rounds per trial", "independent blocks", "trials", *GATE, "mean rounds, 10% slower", "5% slower: found"]
    return markdown(heading, rows)


def gate_simulated() -> str:
    cases = figures("simulations")["gate"]
    rows = ([*settings(key), str(case["trials"]), *gate_shares(case)] for key, case in cases.items())
    return markdown(["scatter of a round", "correlation of rounds", "gates", *GATE], rows)


def gates() -> str:
    complete = [
        (gate, gate["together"]["throughput"], "AMD EPYC AVX2 2 cores")
        for gate in figures("gates-amd-epyc-avx2-2-cores")["gates"]
    ]
    for gate in figures("gate-trials"):
        interval = dict(zip(("estimate", "low", "high"), gate["throughput"]["all together"], strict=True))
        complete.append((gate, interval, gate["machine"]))
    rows = (
        [machine, gate.get("commit", "-")[:8], gate["head"], gate["outcome"], str(gate.get("rounds", "-")),
         f"{gate['seconds'] / 60:.1f}", f"{ratio['estimate']:.2f} ({between(ratio['low'], ratio['high'])})"]
        for gate, ratio, machine in complete
    )  # fmt: skip
    heading = ["machine", "commit", "head", "outcome", "rounds", "minutes", "throughput over all variants"]
    return markdown(heading, rows)


def machines() -> str:
    measured = [figures(name) for name in MACHINES]

    def cell(benchmarks: Mapping[str, Any], name: str) -> str:
        if (benchmark := benchmarks.get(name)) is None:
            return ""
        form = ".0f" if (ratio := benchmark.get("worst_ratio", benchmark.get("median_ratio"))) > 10 else ".3f"
        low, high = benchmark.get("interval", (None, None))
        interval = f" ({between(low, high, form)})" if "interval" in benchmark else ""
        return f"{ratio:{form}}{interval}"

    def target(name: str) -> str:
        newest = next(of for of in reversed(measured) if name in of["benchmarks"])["benchmarks"][name]
        if "target_ratio" not in newest:
            return "none"
        return f"{'at most' if newest.get('lower_is_better') else 'at least'} {newest['target_ratio']:g}"

    rows = (
        [meaning, *(cell(machine["benchmarks"], name) for machine in measured), target(name), f"`{name}`"]
        for name, meaning in BENCHMARKS.items()
    )
    return markdown(["", *(machine["machine"] for machine in measured), "target", "benchmark"], rows)


def distillation() -> str:
    measured = figures("distillation-amd-epyc-avx-512-2-cores")["benchmarks"]["distillation"]

    def gain(points: Mapping[str, float]) -> str:
        return f"{points['mean']:+.2f} ({between(points['low'], points['high'], '+.2f')})"

    rows = (
        [f"`{name}`", *(f"{statistics.mean(student['test_accuracies'][kind]):.2%}" for kind in ("alone", "taught")),
         gain(student["gain_points"]), f"{student['step_seconds_ratio']['median_ratio']:.2f}",
         f"{statistics.mean(student['test_accuracies']['alone_for_longer']):.2%}"
         f" in {student['epochs_at_equal_time']} epochs", gain(student["gain_points_at_equal_time"])]
        for name, student in measured["students"].items()
    )  # fmt: skip
    epochs = measured["epochs"]
    heading = [
        "student",
        f"without teacher, {epochs} epochs",
        f"with teacher, {epochs} epochs",
        "gain, points",
        "step with the teacher, over one without",
        "without teacher in the same time",
        "gain at equal time, points",
    ]
    return markdown(heading, rows)


def projections() -> str:
    rows = []
    for path in sorted(FIGURES.glob("scaling-*.json")):
        recorded = figures(path.stem)["projections"].values()
        for job, predictions in chain.from_iterable(kind["jobs"].items() for kind in recorded):
            for made in predictions:
                speeds = ([f"{speed:.2f}" for speed in made[key]] for key in ("projected", "measured"))
                texts = [f"{middle} ({low} to {high})" for middle, low, high in speeds]
                inside = "yes" if made["inside"] else "no"
                rows.append((job, made["kind"], *texts, f"{made['error_fraction']:+.1%}", inside))
    return markdown(("job", "hosts", "projected", "measured", "error", "inside"), rows)


TABLES: Mapping[str, Callable[[], str]] = {
    table.__name__: table
    for table in (settled, aims, parts, openings, alive, many, drifting, sides, racing, replays, seeds, bias,
                  decided, kept, sessions, best, forecasts, levels, gate_trials, gate_simulated, gates, machines,
                  distillation, projections)
}  # fmt: skip


def rewritten(page: Path) -> str:
    """Return the page with the present tables."""
    marked = "<!-- table {} -->\n\n{}\n\n<!-- end -->"
    return MARKED.sub(lambda part: marked.format(part[1], TABLES[part[1]]()), page.read_text(encoding="utf-8"))


def main() -> None:
    for page in sorted(PAGES.glob("*.md")):
        page.write_text(rewritten(page), encoding="utf-8")


if __name__ == "__main__":
    main()
