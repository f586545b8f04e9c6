"""Techniques that other installed packages provide."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import environment, params, plans
from pipeline.data.prepared import Dataset
from pipeline.distributed import World
from pipeline.errors import ConfigError
from pipeline.params import Config, Train, Variant, outside, parse
from pipeline.techniques import of_plan
from tests.commands import printed
from tests.factories import SHIPPED
from tests.nets import ALONE, make_plan
from tests.outside import EXAMPLE, forget, on_path, write_example_metadata, write_metadata
from tests.ranks import run_ranks
from tests.trainings import make_training
from tests.workspaces import CPU_ONLY

ROOT = Path(__file__).parent.parent
CLIPPED: dict[str, Any] = {"extra": {"gradient_clipping": {"max_norm": 0.25}}}


@pytest.fixture
def clipping(tmp_path: Path) -> Iterator[None]:
    """Install the example package for one test."""
    write_example_metadata(tmp_path / "site")
    with on_path(tmp_path / "site", EXAMPLE):
        yield


def of(**variant: Any) -> Config:
    return parse({"variants": {"baseline": {}, "tried": variant}})


def complaint(**variant: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        of(**variant)
    return str(caught.value)


@pytest.mark.usefixtures("clipping")
def test_it_is_planned_like_a_built_in_one() -> None:
    plan = plans.plan(of(**CLIPPED), "tried", CPU_ONLY)
    assert [technique.name for technique in params.requested(plan.applied)] == ["gradient_clipping"]
    assert [entry.name for entry in params.entries()] == [
        *(built.name for built in params.CATALOGUE),
        "gradient_clipping",
    ]
    assert params.entry("gradient_clipping").searched_for[0] == "clip_grad_norm_"
    assert params.techniques(plan.applied) == {"gradient_clipping": ("extra",)}
    assert params.without(plan.applied, [params.entry("gradient_clipping")]) == Variant()


@pytest.mark.usefixtures("clipping")
@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ({"extra": {"gradient_cliping": {}}}, "variants.tried.extra.gradient_cliping: no technique"),
        ({"extra": {"gradient_clipping": {"max_norm": -1.0}}}, ".extra.gradient_clipping.max_norm: found -1.0; "),
        ({"extra": {"gradient_clipping": {"norm": 1.0}}}, ".extra.gradient_clipping.norm: found 1.0; Extra"),
        ({"extra": {"gradient_clipping": 3}}, ".extra.gradient_clipping: found 3; input should be a mapping"),
        (CLIPPED | {"precision": "fp16"}, "the two exclude each other"),
    ],
)
@pytest.mark.usefixtures("clipping")
def test_what_cannot_be_is_said_before_any_work(variant: dict[str, Any], message: str) -> None:
    assert message in complaint(**variant)


def test_where_none_is_installed() -> None:
    assert "no technique 'ema' is installed; the entry points of " in complaint(extra={"ema": {}})


def _change(joined: World, dataset: Dataset, max_norm: float) -> float:
    """Return the norm of the weights' change in one step of plain SGD with learning rate 1."""
    train = Train(batch_size=32, momentum=0.0, weight_decay=0.0, learning_rate=1.0, warmup_fraction=0.0, epochs=1)
    training = make_training(dataset, joined, train=train, extra={"gradient_clipping": {"max_norm": max_norm}})
    before = [parameter.detach().clone() for parameter in training.model.parameters()]
    training.advance(1)
    changes = [now - then for now, then in zip(training.model.parameters(), before, strict=True)]
    return float(torch.cat([change.detach().flatten() for change in changes]).norm())


@pytest.mark.usefixtures("clipping")
def test_it_is_in_effect_on_two_devices(digits: Dataset) -> None:
    free = _change(ALONE, digits, 1e9)
    assert free > 0.5
    assert _change(ALONE, digits, 0.25) == pytest.approx(0.25, rel=1e-4)
    assert run_ranks(_change, digits, 0.25) == pytest.approx([0.25, 0.25], rel=1e-4)


def test_planning_loads_no_torch(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text(json.dumps(SHIPPED | {"variants": {"baseline": {}, "clipped": CLIPPED}}))
    hashes = []
    for version in ("0.1.0", "0.2.0"):
        write_example_metadata(tmp_path / version, version)
        program = (
            "import sys\nfrom pipeline.cli import main\nassert main(['environment']) == 0\n"
            "assert 'gradient_clipping' in sys.modules\nassert 'torch' not in sys.modules\n"
        )
        path = os.pathsep.join(map(str, (ROOT, tmp_path / version, EXAMPLE)))
        printed(program, cwd=tmp_path, PYTHONPATH=path)
        fingerprint = json.loads((tmp_path / "environment.json").read_text())
        assert fingerprint["relied_on"]["variants"] == {"baseline": {}, "clipped": {"gradient-clipping": version}}
        assert fingerprint["variants"]["clipped"]["code"].keys() >= {"gradient_clipping/technique.py"}
        hashes.append([environment.hash_of(fingerprint, "variants", name) for name in ("baseline", "clipped")])
    assert hashes[0][0] == hashes[1][0]
    assert hashes[0][1] != hashes[1][1]


BROKEN = """
from pipeline.params import Entry
from pipeline.techniques import Technique

def entry(name="one", **fields):
    return Entry(**{"name": name, "does": "", "pays": "", "costs": "", "source": "", "changes": "nothing"} | fields)

one, early, shared = entry(), entry("early", layer="model"), entry("shared", needs=["ddp"])

class One(Technique):
    name = "two"
"""


@contextmanager
def broken_package(
    folder: Path, catalogue: Mapping[str, str], techniques: Mapping[str, str], given: str = "None"
) -> Iterator[None]:
    """Install a package whose entry points name parts of ``BROKEN``, or the expression ``given``, while the block
    runs."""
    points = {outside.CATALOGUE: catalogue, outside.TECHNIQUES: techniques}
    write_metadata(folder, "broken-package", "1.0", points)
    (folder / "broken_package.py").write_text(f"{BROKEN}\ngiven = {given}\n")
    sys.modules.pop("broken_package", None)
    with on_path(folder):
        yield


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("one", "1 / 0", "broken-package 1.0: its technique 'one' cannot be loaded from broken_package:given: Zero"),
        ("one", "'no entry'", "is 'no entry'; expected the technique's Entry"),
        ("one", "entry('ddp')", "found name 'ddp'; expected 'one'"),
        ("one", "entry(changes='roundings')", "Input should be 'nothing', 'rounding' or 'statistics'"),
        ("one", "entry(layer='nowhere')", "Input should be 'model', 'blocks', "),
        ("one", "entry(setting='extra: {one: {}}')", "\nsetting\n  Extra inputs are not permitted"),
        ("one", "entry(implementation='broken_package.One')", "found implementation 'broken_package.One'; expected"),
        ("one", "entry(key='one', value=True)", "found key 'one'; expected 'extra'"),
        ("ddp", "entry('ddp')", "a built-in technique has this name"),
    ],
)
def test_a_broken_entry_is_named(name: str, given: str, message: str, tmp_path: Path) -> None:
    with broken_package(tmp_path, {name: "broken_package:given"}, {}, given):
        assert message in complaint(extra={name: {}})


def test_an_entry_point_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    with broken_package(tmp_path, {"one": "not_there:entry"}, {"two": "broken_package:One"}):
        assert "from not_there:entry: ModuleNotFoundError" in complaint(extra={"one": {}})
        assert "training_performance.catalogue are: one." in complaint(extra={"two": {}})


def test_wrong_packages_are_refused(tmp_path: Path) -> None:
    with broken_package(tmp_path, {"one": "broken_package:one"}, {"one": "broken_package:One"}):
        assert "Options of one: none." in complaint(extra={"one": {"size": 1}})
        with pytest.raises(ConfigError, match=r"expected a class derived from pipeline\.techniques\.Technique"):
            of_plan(make_plan(extra={"one": {}}))
        write_metadata(tmp_path, "other-package", "2.0", {outside.CATALOGUE: {"one": "other_package:entry"}})
        forget()
        assert "provide the technique 'one'" in complaint(extra={"one": {}})


def test_one_with_a_parallelism_goes_with_it(tmp_path: Path) -> None:
    with broken_package(tmp_path, {name: f"broken_package:{name}" for name in ("one", "shared", "early")}, {}):
        asked = of(parallelism="ddp", processes=1, extra={"one": {}, "shared": {}})
        made = plans.plan(asked, "tried", CPU_ONLY)
        assert list(made.skipped) == ["ddp", "shared"]
        assert made.applied.extra == {"one": {}}
        mixed = Variant(channels_last=True, precision="bf16", extra={"one": {}, "early": {}})
        names = [technique.name for technique in params.catalogue.in_order(mixed)]
    assert names == ["channels_last", "early", "bf16", "one"], "each at its layer"
