"""The command ``script``: measure which changes of anybody's own training command pay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pipeline import environment, files, report
from pipeline.benchmark.rounds import calibrate, steps_of
from pipeline.benchmark.server import ArmSpec
from pipeline.benchmark.stage import begin_session, file_name, side_by_side
from pipeline.comparison import sessions
from pipeline.comparison.compare import compare
from pipeline.comparison.comparison_file import Comparison
from pipeline.errors import ConfigError, count, first_line, say
from pipeline.params import Compare, Config, parse
from pipeline.params.commands import commands_of
from pipeline.params.loading import parse_yaml
from pipeline.report import facts
from pipeline.results import Arm, Bench, Result, ScoreName, Unit, read_sessions
from pipeline.script.arms import Scripts
from pipeline.script.sameness import credits_of, lines, same_jobs

BASE = "base"
"""The name of the arm that runs the command as it is."""


def config_of(settings: Sequence[str]) -> Config:
    """Return the configuration with these KEY=VALUE, whose values are read as in params.yaml. Raises ConfigError."""
    values: dict[str, Any] = {"variants": {BASE: {}}, "compare": {"baseline": BASE}}
    for setting in settings:
        keys, equals, text = setting.partition("=")
        *sections, key = keys.split(".")
        section = values
        if not equals or sections[:1] not in (["bench"], ["compare"]):
            raise ConfigError(f"--set: found {setting!r}; expected KEY=VALUE, with a key of bench or compare.")
        try:
            for name in sections:
                section = section.setdefault(name, {})
            section[key] = parse_yaml(text, f"the value {text!r}")
        except (ConfigError, AttributeError, TypeError) as error:
            raise ConfigError(f"--set: found {setting!r}; expected KEY=VALUE. ({first_line(error)})") from None
    return parse(values, "--set")


def run(
    base: str,
    arms: Sequence[tuple[str, str, bool]],
    *,
    minutes: float,
    settings: Sequence[str],
    output: Path,
    batch_differs: bool,
    **options: Any,
) -> None:
    """Measure the arms side by side; write the report, and the session's bench, into ``output``.

    ``settings``: KEY=VALUE for keys of params.yaml. ``batch_differs``: the arms take different numbers of samples a
    step on purpose. ``options``: those of ``jobs.Job``.
    Raises PipelineError, and KeyboardInterrupt, whose message says which rounds are kept.
    """
    commands = commands_of(BASE, base, arms)
    for option, allowed in ("timeout", options["timeout"] > 0), ("optimizer", options["optimizer"] >= 0):
        if not allowed:  # NaN is not above 0
            raise ConfigError(f"--{option}: found {options[option]}; expected a number above 0.")
    if output.exists() and not output.is_dir():
        raise ConfigError(f"--output: found the file {output}; expected a directory, or a new name.")
    config = config_of([f"bench.max_minutes={minutes}", *settings])
    bench_settings, compared = config.bench, config.compare
    session_so_far, earlier = begin_session(), read_sessions(output / "sessions")
    with Scripts(bench_settings, left_out=[output.resolve()], **options) as server:
        specs = [ArmSpec.of_variant(name, server, command._asdict()) for name, command in commands.items()]
        control = specs[0].control()
        samples = {}
        for number, spec in enumerate(specs, 1):
            say(f"script: first sample of {spec.name}, {number} of {len(specs)}: {commands[spec.name].changed}")
            samples[spec.name] = calibrate(spec, ledgers=True)
        say(f"script: {BASE} again, as the control")
        steps, samples[control.name] = steps_of(
            control, bench_settings.window_seconds, [*samples.values()], ledgers=True
        )
        answers = {name: sample.answer for name, sample in samples.items()}
        jobs = same_jobs(answers, BASE, control.name)
        credited = credits_of(jobs, BASE, batch_differs=batch_differs)
        say("\n".join(f"script: {line}" for line in lines(jobs, answers, BASE)))
        fingerprint = fingerprint_of(answers[BASE]["ranks"][0])
        keys = {
            name: files.json_sha256(
                [fingerprint["hash"], command, credited[name], answers[name]["examined"][0]["sources"]]
            )
            for name, command in commands.items()
        }

        def keep(bench: Bench) -> None:
            files.write_text(output / "sessions" / file_name(bench), bench.to_json())
            tqdm.write(row_of(compared_in([bench], compared, fingerprint)))

        on_gpu = answers[BASE]["ranks"][0]["gpu"]
        # Between turns, processes that read ahead would work for the next turn.
        alone = on_gpu or any(answer["workers"] for answer in answers.values())
        bench = side_by_side(
            "script",
            [replace(spec, plan=spec.plan | {"samples": credited[spec.variant]}) for spec in (*specs, control)],
            bench_settings,
            "cuda" if alone else "cpu",
            steps=steps,
            round_seconds=sum(sample.seconds(steps) for sample in samples.values()),
            session=session_so_far,
            keep=keep,
            settled=lambda so_far: sessions.settled(so_far.arms, compared),
            environment=fingerprint["hash"],
            commit=environment.checked_out(),
            config={"train": {"command": base}, "bench": bench_settings.model_dump(mode="json")},
            dataset=None,
            baseline=BASE,
            margins=compared.margins,
            same_job=jobs,
            keys=keys,
        )
    files.write_text(output / "sessions" / file_name(bench), bench.to_json())
    comparison = compared_in([bench, *earlier], compared, fingerprint)
    report.write(comparison, {name: [] for name in commands}, output)
    report.say_verdicts(comparison, output)
    if bench.interrupted:
        raise KeyboardInterrupt(f"{count(bench.rounds, 'complete round')} kept in {output}")


def fingerprint_of(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the environment's fingerprint, with the versions that the script's rank uses."""
    content = environment.fingerprint()
    content["software"] |= {key: about[key] for key in ("python", "torch")}
    return content | {"hash": environment.hash_of(content, "variants")}


def compared_in(benches: Sequence[Bench], settings: Compare, fingerprint: Mapping[str, Any]) -> Comparison:
    """Compare the arms of the first bench; further benches are earlier sessions. Nothing was trained to its end, so
    no accuracy is known."""
    results = [result_of(arm, benches[0]) for arm in benches[0].arms if arm.role == "variant"]
    return compare(results, {result.variant: [] for result in results}, benches, settings, fingerprint)


def result_of(arm: Arm, bench: Bench) -> Result:
    """Return the result of an arm, without runs."""
    known = all(job.samples_per_step for job in bench.same_job.values())
    return Result(
        variant=arm.variant, environment=bench.environment, config={"train": bench.config["train"], "variant": {}},
        dataset=None, key=bench.keys[arm.variant], history_sha256="", score=ScoreName(name="accuracy"),
        unit=Unit() if known else Unit(name="steps"), runs=(), **dict(arm.conditions),
    )  # fmt: skip


def row_of(comparison: Comparison) -> str:
    """Return one row of the live table: the ratios of the throughputs so far."""
    ratios = {compared.variant: compared.throughput for compared in comparison.variants[1:]}
    texts = [f"{name} {facts.text(ratio)}" for name, ratio in ratios.items() if ratio]
    noise = f"A/A {facts.text(comparison.noise_throughput)}"
    return f"script: round {comparison.bench.rounds}: {'; '.join([*texts, noise])}"
