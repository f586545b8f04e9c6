"""The number of processes that share a model depends on the built model, and is decided before the processes start."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.distributed import forked
from pipeline.errors import ConfigError
from pipeline.params import Config, Machine, parse
from pipeline.plans import Plan
from pipeline.plans import plan as plan_of
from pipeline.profiling import steps
from pipeline.training import job
from pipeline.training.assembly import assembled, planned, preload_for
from tests.conftest import ROOT
from tests.workspaces import CPU_ONLY, PREPARED, furnish


def gpus(count: int) -> Machine:
    return Machine(gpus=count, gpu_native_bf16=True, cpu_native_bf16=True)


def configured(variants: dict[str, Any], **train: Any) -> Config:
    """Return a config for the digits and small_cnn, a chain of four units with 50 values between its linear layers."""
    return parse({"fetch": {"dataset": "digits"}, "train": train, "variants": {"baseline": {}} | variants})


READY_MADE = {
    name: values
    for stem in ("pipeline", "sharded")
    for name, values in yaml.safe_load((ROOT / "variants" / f"{stem}.yaml").read_text(encoding="utf-8")).items()
}


@pytest.fixture(scope="module", autouse=True)
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("workspace")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        furnish(configured({}))
        yield directory


@pytest.mark.parametrize(
    ("name", "processes"),
    [
        # on 3 to 9 GPUs, and on 16
        ("tensor", (2, 2, 5, 5, 5, 5, 5, 10)),
        ("tensor-replicas", (None, 4, 4, 4, 4, 4, 4, 10)),
        ("pipeline-1f1b", (3, 4, 4, 4, 4, 4, 4, 4)),
        ("pipeline-checkpointed", (3, 3, 3, 3, 3, 3, 3, 3)),  # each unit is a whole block
        ("pipeline-x-ddp", (None, 4, 4, 6, 6, 8, 8, 8)),
    ],
)
def test_a_model_bounds_the_gpus_it_uses(name: str, processes: tuple[int | None, ...]) -> None:
    config = configured(READY_MADE)
    for count, expected in zip((*range(3, 10), 16), processes, strict=True):
        if expected is None:
            with pytest.raises(ConfigError, match=f"{name}.replicas: found 2"):
                planned(config, name, gpus(count), PREPARED)
            continue
        made = planned(config, name, gpus(count), PREPARED)
        assert made.processes == expected
        assert list(made.skipped) == ([f"{count - expected} of {count} GPUs"] if count > expected else [])
        assert (made.requested, made.applied.processes) == (config.variants[name], "auto")


@pytest.mark.parametrize(("of_host", "hosts"), [("2", 2), ("4", 1), (None, 1)])
def test_a_launcher_divides_the_plan_among_hosts(
    of_host: str | None, hosts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": of_host}.items():
        if value:
            monkeypatch.setenv(name, value)
    assert planned(configured({"ddp": {"parallelism": "ddp"}}), "ddp", gpus(0), PREPARED).hosts == hosts


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ({"parallelism": "tensor", "processes": 3}, "'tensor' of 3 processes, .* 50 values"),
        ({"parallelism": "tensor", "replicas": 2, "processes": 8}, "'tensor' of 4 processes, .* 50 values"),
        ({"parallelism": "pipeline", "processes": 5}, "'pipeline' of 5 processes, .* 4 part"),
        ({"parallelism": "tensor", "model": "resnet9"}, ".* has no two linear layers"),
    ],
)
@pytest.mark.parametrize("machine", [gpus(0), gpus(8)])
def test_a_model_that_cannot_be_divided_is_refused(variant: dict[str, Any], message: str, machine: Machine) -> None:
    with pytest.raises(ConfigError, match=rf"variants\.tried\.parallelism: found {message}.*; allowed: "):
        planned(configured({"tried": variant}), "tried", machine, PREPARED)


@pytest.mark.parametrize("start", [job.run, steps.run])
def test_the_number_of_processes_is_known_first(
    start: Callable[[Config, str, Machine, Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    monkeypatch.setattr(
        f"{start.__module__}.launch",
        lambda worker, arguments, processes, hosts: started.append(processes),  # noqa: ARG005
    )
    start(configured(READY_MADE), "tensor", gpus(8), PREPARED)
    with pytest.raises(ConfigError):
        start(configured({"tried": {"parallelism": "tensor", "processes": 8}}), "tried", gpus(8), PREPARED)
    assert started == [5]


@pytest.mark.parametrize(
    ("model", "libraries"),
    [
        ("small_cnn", []),
        ("resnet18", ["torchvision.models"]),
        ("transformers", ["transformers.modeling_utils"]),
        ("own_net:net", ["timm", "transformers.modeling_utils"]),  # one of them is imported by what the module imports
    ],
)
def test_a_jobs_libraries_are_imported_before_forks(model: str, libraries: list[str]) -> None:
    Path("own_net.py").write_text("import own_parts\nimport scipy\n\ndef net():\n    from timm.models import vit\n")
    Path("own_parts.py").write_text("from transformers import BertModel\n")
    plan = plan_of(configured({}, model=model), "baseline", CPU_ONLY)
    assert preload_for(plan) == ["torch._dynamo", *libraries]
    # On GPUs, a library that asks the driver while it is imported would keep forks from using CUDA.
    on_gpu = plan_of(configured({}, model=model), "baseline", gpus(1))
    assert preload_for(on_gpu) == ["torch._dynamo"]


def _imported(plan: Plan) -> Generator[bool, None, None]:
    with assembled(plan, PREPARED):
        yield "torchvision.models" in sys.modules


def test_what_a_model_imports_late_is_no_memory_of_a_training() -> None:
    Path("late.py").write_text(
        "def net(classes, **_):\n    from torchvision import models\n    return models.resnet18(num_classes=classes)\n"
    )
    plan = plan_of(configured({}, model="late:net"), "baseline", CPU_ONLY)
    with forked(_imported, (plan,), 1, preload=["pipeline.training.loop"]) as ask:
        assert ask(None) == [True]
