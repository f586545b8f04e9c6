"""Compare every ready-made variant that this machine can run with the baseline of the default job.

    python -m benchmarks.ready_made [SET ...] [--rounds 7]

Each set in ``variants/`` is measured in one bench, with all its variants side by side. The figures are written to
``ready-made-<machine>.json``, and tables of them to the ``.md`` file next to it. The figures of sets that the user does
not name stay in both files.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.processes import let_threads_sleep

let_threads_sleep()  # as in `python -m pipeline`

from benchmarks import machines
from benchmarks.pairs import ROOT, Checkout
from benchmarks.stages import fashion_mnist
from pipeline import environment, files, params, results
from pipeline.comparison import verdicts
from pipeline.comparison.planning import cost_of
from pipeline.report import formats

SETS = sorted(path.stem for path in (ROOT / "variants").glob("*.yaml"))
SECTIONS: dict[str, dict[str, Any]] = {"memory": {"optimizer": "adamw", "learning_rate": 0.001}}
"""Set -> the settings under ``train`` that it needs. Some techniques of this set change AdamW's state."""
LONG_ENOUGH = 60.0
"""Time limit of a bench in minutes, so long that the number of rounds ends the bench first."""
FIELDS = (verdicts.THROUGHPUT.field, verdicts.MEMORY.field)


def measure(name: str, rounds: int) -> dict[str, Any] | None:
    """Run one bench of a set's variants and the baseline; return each variant's ratios to the baseline.

    Return None if this machine can run no variant of the set.
    """
    config = params.load(ROOT / params.PARAMS_FILE)
    values = config.model_dump(mode="json")
    values["train"] |= SECTIONS.get(name, {})
    values["bench"] |= {"max_minutes": LONG_ENOUGH, "max_rounds": rounds}
    values["variants"] = {config.compare.baseline: {}}
    with tempfile.TemporaryDirectory() as folder:
        _, packed = fashion_mnist(Path(folder))
        checkout = Checkout(Path(folder, "checkout"), **values)
        checkout.use(packed)
        checkout.stage("variants", name, "--add")
        if len(params.load(checkout.path / params.PARAMS_FILE).variants) == 1:
            return None
        checkout.stage("bench")
        bench = results.read_bench(checkout.path / results.BENCH_FILE)
    noises, found = ratios(bench, config.compare)
    return {
        "commit": environment.checked_out(),
        "optimizer": values["train"]["optimizer"],
        "seconds": round(bench.seconds),
        "steps": bench.steps,
        "rounds": bench.rounds,
        "noise": [noise.model_dump(mode="json") for noise in noises],
        "variants": {
            arm.variant: {
                "world_size": arm.world_size,
                "skipped": arm.skipped,
                "decided": arm.decided,
                **{field: ratio.model_dump(mode="json") for field, ratio in found[arm.variant].items()},
            }
            for arm in bench.arms
            if arm.variant in found and arm.role == "variant"
        },
    }


def ratios(
    bench: results.Bench, settings: params.Compare
) -> tuple[list[verdicts.Noise], dict[str, dict[str, verdicts.Ratio]]]:
    """Return the noise of each of ``FIELDS``, and variant -> field -> its ratio to the baseline."""
    baseline, control = bench.arm("variant", bench.baseline), bench.arm("aa_control", bench.baseline)
    assert baseline is not None
    assert control is not None
    margins = settings.margins
    noises, found = [], dict[str, dict[str, verdicts.Ratio]]()
    for quantity, margin in ((verdicts.THROUGHPUT, margins.throughput), (verdicts.MEMORY, margins.memory)):
        noise = verdicts.noise_between(baseline, control, quantity, settings.max_spread, cost_of(bench))
        noises.append(noise)
        for arm in bench.arms:
            if arm.role == "variant" and arm is not baseline:
                ratio = verdicts.ratio(arm, baseline, quantity, margin, noise, widen=True)
                found.setdefault(arm.variant, {})[quantity.field] = ratio
    return noises, found


def page(figures: Mapping[str, Any]) -> str:
    """Return the figures of all sets as Markdown."""
    lines = [
        f"# Ready-made variants on {figures['machine']}",
        "Ratios to the baseline of the default job, with 95% intervals. Written by `python -m benchmarks.ready_made`.",
    ]
    for name, found in figures["sets"].items():
        noise = [formats.interval(verdicts.Noise.model_validate(each)) for each in found["noise"]]
        lines += [
            f"## {name}",
            f"{formats.count(found['rounds'], 'round')} of {found['steps']} steps with {found['optimizer']}, "
            f"{found['measured_on']}. The baseline against itself: throughput {noise[0]}, peak memory {noise[1]}.",
            "\n".join(_table(found["variants"])),
            "\n".join(_notes(found["variants"])),
        ]
    return "\n\n".join(line for line in lines if line).replace(formats.JOINED, " ") + "\n"


def _table(variants: Mapping[str, Any]) -> Iterator[str]:
    yield "| variant | processes | throughput | peak memory |"
    yield "| --- | --- | --- | --- |"
    for name, each in variants.items():
        cells = (formats.ratio_text(verdicts.Ratio.model_validate(each[field])) for field in FIELDS)
        yield f"| `{name}` | {each['world_size']} | {' | '.join(cells)} |"


def _notes(variants: Mapping[str, Any]) -> Iterator[str]:
    for name, each in variants.items():
        for technique, why in each["skipped"].items():
            yield f"* `{name}`: {technique} is skipped: {why}"
        for technique, what in each["decided"].items():
            yield f"* `{name}`: {technique}: {what}"
        for why in dict.fromkeys(each[field]["why_untrusted"] for field in FIELDS):
            if why:
                yield f"* `{name}`: {why}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ready_made",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sets", nargs="*", metavar="SET", help=f"any of {', '.join(SETS)}; default: all")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    if unknown := set(arguments.sets) - set(SETS):
        parser.error(f"no such set: {', '.join(sorted(unknown))}")

    for name in arguments.sets or SETS:
        found = measure(name, arguments.rounds)
        if found is None:
            print(f"{name}: this machine can run no variant of this set", flush=True)
            continue
        path, figures = machines.keep(machines.FIGURES, "ready-made-", "sets", name, found)
        files.write_text(path.with_suffix(".md"), page(figures))
        print(f"{name}: {found['rounds']} rounds in {found['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
