"""Adding seeds until every accuracy is decided."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from pipeline import results
from pipeline.params import load
from pipeline.tools import seeds
from tests.factories import make_result, make_run

PARAMS = """\
train:
  seeds: [0, 1, 2]            # one run per seed
compare: {baseline: plain}
variants:
  plain: {}
  other: {channels_last: true}
"""


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], list[Sequence[str]]]:
    """A function that fakes DVC: `dvc repro` writes results whose accuracies differ by a mean and a deviation, both in
    correct samples of 10,000. The function returns the list of DVC's arguments."""
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text(PARAMS, encoding="utf-8")

    def fake(mean: float, deviation: float) -> list[Sequence[str]]:
        called: list[Sequence[str]] = []
        drawn = np.random.default_rng(1).normal(mean, deviation, 20)

        def dvc(_: object, *arguments: str) -> None:
            called.append(arguments)
            config = load()
            for name, differences in (("plain", np.zeros(20)), ("other", drawn)):
                runs = [
                    make_run(seed, test_correct=9000 + round(differences[seed]), model_sha256=f"{name}{seed}")
                    for seed in config.train.seeds
                ]
                train = {"train": config.train.model_dump(mode="json"), "variant": config.variants[name].model_dump()}
                results.write(make_result(name, runs, config=train), results.result_file(name))

        monkeypatch.setattr(seeds, "dvc", dvc)
        monkeypatch.setattr(results, "read", lambda file, _: results.Result.model_validate_json(file.read_bytes()))
        return called

    return fake


def test_seeds_are_added_until_a_look_decides(
    trained: Callable[[float, float], list[Sequence[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    called = trained(0, 60)
    seeds.add(12)
    added = load().train.seeds
    assert 3 < len(added) < 12
    assert added == list(range(len(added)))
    assert called == [("repro", "train@plain", "train@other")] * (len(added) - 2)
    assert "all variants are decided\nrun `dvc repro` for the report\n" in capsys.readouterr().out
    text = Path("params.yaml").read_text(encoding="utf-8")
    assert text.split() == PARAMS.replace("[0, 1, 2]", str(added)).split()


def test_no_seed_is_added_beyond_the_most(
    trained: Callable[[float, float], list[Sequence[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    trained(-100, 60)  # on the margin
    seeds.add(5)
    assert load().train.seeds == [0, 1, 2, 3, 4]
    said = capsys.readouterr().out
    assert re.search(r"accuracy with 3 seeds: undecided: other \(.* points at 99\.5%\)\n", said)
    assert re.search(r"accuracy with 5 seeds: undecided: other \(.* points at 95%\)\n", said)


def test_what_three_seeds_decide_needs_no_more(trained: Callable[[float, float], list[Sequence[str]]]) -> None:
    called = trained(-900, 1)
    seeds.add(12)
    assert len(called) == 1
