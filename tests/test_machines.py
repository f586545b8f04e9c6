"""The files of the benchmarks' figures, and the printed line of a figure."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import machines
from benchmarks.__main__ import BENCHMARKS, main
from pipeline import environment
from tests.factories import ENVIRONMENT


def test_figures_name_the_environment_in_which_each_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(torch: str, name: str) -> tuple[Path, dict[str, Any]]:
        software = ENVIRONMENT["software"] | {"torch": torch}
        here = ENVIRONMENT | {"hash": f"hash of {torch}", "software": software, "relied_on": {}}
        monkeypatch.setattr(environment, "fingerprint", lambda: here)
        return machines.keep(tmp_path, "", "benchmarks", name, {"median_ratio": 1.0})

    measured("2.11", "one")
    path, content = measured("2.15", "other")
    assert path == tmp_path / "example-cpu-2-0-ghz-avx2-2-cores.json"
    assert json.loads(path.read_text(encoding="utf-8")) == content
    assert content["machine"] == "Example CPU @ 2.0 GHz AVX2 2 cores"
    names = {name: figure["environment"] for name, figure in content["benchmarks"].items()}
    assert names == {"one": "hash of 2.11", "other": "hash of 2.15"}
    versions = {digest: each["software"]["torch"] for digest, each in content["environments"].items()}
    assert versions == {"hash of 2.11": "2.11", "hash of 2.15": "2.15"}
    _, content = measured("2.15", "one")
    assert list(content["environments"]) == ["hash of 2.15"], "an environment without figures is still listed"


@pytest.mark.parametrize(
    ("figure", "said"),
    [
        ({"median_ratio": 2.0}, "no target"),
        ({"median_ratio": 2.0, "target_ratio": 1.5}, "at least 1.5  met"),
        ({"median_ratio": 2.0, "target_ratio": 1.5, "lower_is_better": True}, "at most 1.5  MISSED"),
    ],
)
def test_a_figure_is_printed_beside_its_target_if_it_has_one(
    figure: dict[str, Any],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(BENCHMARKS, "turns", lambda: figure)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "turns", "--figures", str(tmp_path)])
    main()
    assert said in capsys.readouterr().out
    assert list(tmp_path.iterdir())
