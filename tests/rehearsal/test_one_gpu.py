"""Every ready-made variant on one simulated GPU: it trains what the baseline trains, and no step waits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pipeline import environment
from pipeline.errors import ConfigError
from pipeline.params import entry, parse, requested
from pipeline.plans import plan
from pipeline.results import Result
from tests.as_if_cuda import NAME, as_if_cuda
from tests.rehearsal.jobs import LANGUAGE_MODEL, READY_MADE, SETS, STEPS, furnished, job_of, offered, result_of, train

WAITS = {
    "low_bit_optimizer": "bitsandbytes waits after each parameter",
    "factored_optimizer": "torch's Adafactor reads two norms a parameter",
}
"""Technique -> why its steps wait on one GPU. Its ``costs`` say so, too."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("one-gpu")


@pytest.fixture
def _gpu(
    baseline: Result,  # noqa: ARG001  (it must simulate its own GPU before this one)
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[None]:
    monkeypatch.chdir(folder)
    with as_if_cuda():
        yield


@pytest.fixture(scope="module")
def baseline(folder: Path) -> Result:
    with pytest.MonkeyPatch.context() as patch, as_if_cuda():
        patch.chdir(folder)
        config = furnished(folder)
        train(config, "baseline", environment.machine())
        return result_of(config, "baseline")


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize(("name", "variant"), READY_MADE)
def test_each_technique_trains_as_the_baseline_without_waiting(
    baseline: Result, folder: Path, name: str, variant: str
) -> None:
    values, machine = SETS[name][variant], environment.machine()
    furnished(folder, **job_of(values))
    config = offered(name, variant, machine)
    if config is None:  # because no technique of the variant can run on one GPU
        alone = parse({"compare": {"baseline": variant}, "variants": {variant: values}})
        with suppress(ConfigError):
            assert not requested(plan(alone, variant, machine).applied)
        return
    steps = train(config, variant, machine)
    result = result_of(config, variant)
    assert (result.device, result.backend, len(steps)) == (NAME, None, STEPS)
    techniques = requested(config.variants[variant])
    if all(technique.changes != "statistics" for technique in techniques):
        assert result.runs[0].train_loss == pytest.approx(baseline.runs[0].train_loss, rel=0.01)
    waiting = [technique.name for technique in techniques if technique.name in WAITS]
    assert all(bool(step.waits) is bool(waiting) for step in steps), {line for step in steps for line in step.waits}


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize(
    "variant",
    [{"precision": "float8"}, *({"attention": name, "precision": "bf16"} for name in ("flash", "efficient", "cudnn"))],
    ids=str,
)
def test_attention_trains_and_waits_for_nothing(folder: Path, variant: dict[str, Any]) -> None:
    exact = variant.get("attention") != "cudnn"
    config = furnished(folder, {"tried": variant}, model="tests.nets:attending_net", deterministic=exact)
    steps = train(config, "tried", environment.machine())
    assert variant.items() <= result_of(config, "tried").applied.items()
    assert len(steps) == STEPS
    assert not [line for step in steps for line in step.waits]


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize("variant", LANGUAGE_MODEL.values(), ids=LANGUAGE_MODEL)
def test_a_language_model_trains_and_waits_for_nothing(folder: Path, variant: dict[str, Any]) -> None:
    (folder / "texts").mkdir(exist_ok=True)
    for index in range(8):
        (folder / "texts" / f"{index}.txt").write_text("".join(f"{n} hills " for n in range(index, 150 + index)))
    data = {"fetch": {"dataset": "text_folder", "text_folder": "texts"}, "prepare": {"window": 16}}
    options = {"width": 32, "depth": 2, "heads": 2}
    job = {"task": "language_model", "model": "gpt", "model_options": options, "optimizer": "adamw"}
    config = furnished(folder, {"gpt": variant}, data, **job, learning_rate=0.01, epochs=1)
    steps = train(config, "gpt", environment.machine())
    (run,) = result_of(config, "gpt").runs
    assert (run.train_loss or math.nan) < 4.5, "a guess among 257 tokens has a loss of 5.5"
    assert len(steps) == run.steps > 8
    assert not [line for step in steps for line in step.waits]


def test_what_waits_says_so() -> None:
    assert all("wait" in entry(name).costs for name in WAITS)
