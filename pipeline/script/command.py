"""The command ``script``: measure which changes of anybody's own training command pay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pipeline import environment, files, report
from pipeline.benchmark.stage import begin_session, file_name, measured, served
from pipeline.comparison import looks
from pipeline.comparison.compare import compare
from pipeline.comparison.comparison_file import Comparison
from pipeline.environment import stages
from pipeline.errors import ConfigError, count
from pipeline.params import Compare, Config, parse
from pipeline.params.loading import parse_yaml
from pipeline.plans import plans
from pipeline.report import facts
from pipeline.results import Arm, Bench, Result, ScoreName, Unit, read_sessions
from pipeline.script.arms import Scripts
from pipeline.script.training import examined

BASE = "base"
"""The name of the arm that runs the command as it is."""


def config_of(
    base: str, arms: Sequence[tuple[str, str, str]], settings: Sequence[str], *, minutes: float, **script: Any
) -> Config:
    """Return the configuration of a project with this script. ``arms``: name, and key and value of a variant.
    ``settings``: KEY=VALUE, whose values are read as in params.yaml. ``script``: of the section ``script``. Raises
    ConfigError."""
    values: dict[str, Any] = {
        "script": {"command": base, "metric": {"pattern": "(.*)"}, **script},
        "bench": {"max_minutes": minutes},
        "variants": {BASE: {}},
        "train": {"seeds": [0]},
        "compare": {"baseline": BASE},
    }
    for name, key, text in arms:
        if not text.strip():
            raise ConfigError(f"--arm {name}: found nothing that it changes; expected NAME=ARGUMENTS.")
        if values["variants"].setdefault(name, {key: text}) != {key: text}:
            raise ConfigError(f"--arm {name}: found the name twice; allowed: a new name, and not {BASE}.")
    for setting in settings:
        place, equals, text = setting.partition("=")
        *places, last = place.split(".")
        section = values
        try:
            for name in places:
                section = section.setdefault(name, {})
            section[last] = parse_yaml(text, "the value")
        except (ConfigError, AttributeError, TypeError):
            equals = ""
        if not equals or places[:1] not in (["bench"], ["compare"], ["script"]):
            raise ConfigError(f"--set: found {setting!r}; expected KEY=VALUE, with a key of bench, compare or script.")
    return parse(values, "the command line")


def run(output: Path, **asked: Any) -> None:
    """Measure the arms side by side; write the report, and the session's bench, into ``output``.

    ``asked``: the arguments of ``config_of``. Raises PipelineError, and KeyboardInterrupt, whose message says which
    rounds are kept.
    """
    config = config_of(**asked)
    if output.exists() and not output.is_dir():
        raise ConfigError(f"--output: found the file {output}; expected a directory, or a new name.")
    session, earlier, machine = begin_session(), read_sessions(output / "sessions"), environment.machine()
    content = environment.fingerprint() | stages.described(config, plans(config, machine), script=examined(config))

    def keep(bench: Bench) -> None:
        files.write_text(output / "sessions" / file_name(bench), bench.to_json())
        tqdm.write(row_of(compared_in([bench], config.compare, content)))

    rules = {"settled": lambda rounds: looks.settled(rounds.arms, config.compare)}
    with served(config, machine, Scripts(config, content), content) as job:
        bench = measured(config, job, session, keep, again=True, **rules)
    files.write_text(output / "sessions" / file_name(bench), bench.to_json())
    comparison = compared_in([bench, *earlier], config.compare, content)
    report.write(comparison, {name: [] for name in config.variants}, output)
    report.say_verdicts(comparison, output)
    if bench.interrupted:
        raise KeyboardInterrupt(f"{count(bench.rounds, 'complete round')} kept in {output}")


def compared_in(benches: Sequence[Bench], settings: Compare, fingerprint: Mapping[str, Any]) -> Comparison:
    """Compare the arms of the first bench; further benches are earlier sessions. Nothing was trained to its end, so
    no accuracy is known."""
    results = [result_of(arm, benches[0]) for arm in benches[0].arms if arm.role == "variant"]
    return compare(results, {result.variant: [] for result in results}, benches, settings, fingerprint)


def result_of(arm: Arm, bench: Bench) -> Result:
    """Return the result of an arm, without runs."""
    seen = all(job.samples_per_step for job in bench.same_job.values())
    unit = Unit(name="samples" if seen or "samples_per_step" in bench.config["train"] else "steps")
    return Result(
        variant=arm.variant, environment=bench.environment, config={"train": bench.config["train"], "variant": {}},
        dataset=None, key=bench.keys[arm.variant], history_sha256="", score=ScoreName(name="accuracy"),
        unit=unit, runs=(), **dict(arm.conditions),
    )  # fmt: skip


def row_of(comparison: Comparison) -> str:
    """Return one row of the live table: the ratios of the throughputs so far."""
    ratios = {compared.variant: compared.throughput for compared in comparison.variants[1:]}
    texts = [f"{name} {facts.text(ratio)}" for name, ratio in ratios.items() if ratio]
    noise = f"A/A {facts.text(comparison.noise_throughput)}"
    return f"script: round {comparison.bench.rounds}: {'; '.join([*texts, noise])}"
