"""The arms of a project's script, served to the bench and the gate by the same requests as variants of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipeline import environment
from pipeline.benchmark import arm
from pipeline.errors import ConfigError
from pipeline.params import Config
from pipeline.script import inputs, sameness
from pipeline.script.arms import Scripts, samples_of


def serve(config: Config) -> None:
    """Answer the requests of ``benchmark.server``, and one more: whether the arms do the same job.

    An arm's first start also examines it: its parameters after a few steps, and its samples a step, which all later
    starts are credited with.
    """
    script = config.script
    assert script is not None
    examined: dict[str, dict[str, Any]] = {}

    def describe() -> dict[str, Any]:
        content = inputs.recorded(config)
        values = config.model_dump(mode="json", include={"variants", "bench", "compare", "gate"})
        return values | {
            "train": config.job,
            "environment": environment.hash_of(content, "variants", *config.variants),
            "dataset": None,
            "device": "cuda" if content["script"]["alone"] else "cpu",
            "requests": [*commands],
        }

    def plan(name: str, values: dict[str, Any]) -> dict[str, Any]:
        own = type(config.variants[config.compare.baseline]).model_validate(values)
        alone = config.model_copy(update={"variants": {name: own}})
        return alone.command_of(name).seeded(config.train.seeds[0])._asdict()

    def open_(name: str, plan: dict[str, Any], steps: int, ledgers: bool = False) -> dict[str, Any]:  # noqa: ARG001
        counted = samples_of(examined[name]["examined"]) if name in examined else None
        scripts.open(name, plan | {"samples": plan["samples"] or counted}, steps, ledgers=name not in examined)
        return {}

    def turn(name: str, steps: int) -> dict[str, Any]:
        scripts.turn(name, steps)
        return {}

    def close(name: str) -> dict[str, Any]:
        answer = scripts.close(name)
        seen = samples_of(examined.setdefault(name, answer)["examined"])
        samples = {"samples_per_step": script.samples_per_step or seen, "samples_seen": seen}  # None if unknown
        told = {key: value for key, value in answer.items() if key != "examined"}
        return told | samples | {"batch_differs": script.batch_differs}

    def same_jobs(base: str, control: str) -> dict[str, Any]:
        jobs = sameness.same_jobs(examined, base, control)
        sameness.credits_of(jobs, base, batch_differs=script.batch_differs)
        unknown = [name for name, job in jobs.items() if job.samples_per_step is None]
        if 0 < len(unknown) < len(jobs) and script.samples_per_step is None:
            raise ConfigError(
                f"the samples of a step cannot be seen in {', '.join(unknown)}: set script.samples_per_step."
            )
        values = {name: job.model_dump(mode="json") for name, job in jobs.items()}
        return {"jobs": values, "lines": [*sameness.lines(jobs, examined, base)]}

    commands: dict[str, Callable[..., dict[str, Any]]] = {
        "describe": describe, "plan": plan, "open": open_, "turn": turn, "close": close, "same_jobs": same_jobs,
    }  # fmt: skip
    with (
        inputs.fresh_outputs(config, config.train.seeds[0]),
        Scripts(config.bench, **inputs.options_of(config)) as scripts,
    ):
        arm.answer_requests(commands)
