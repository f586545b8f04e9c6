"""Where the benchmarks keep their figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import machines
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
    assert list(content["environments"]) == ["hash of 2.15"], "no figure was measured in the other any more"
