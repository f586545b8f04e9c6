"""Known answers for the benchmarks that estimate or simulate variance and error rates."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import machines
from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.gate import bounds, error_rates, gate_of_drawn_rounds
from benchmarks.levels import components
from benchmarks.simulations import best_of, equal_arms, kept, looking, recorded, sides
from pipeline import environment
from tests.factories import ENVIRONMENT


@pytest.mark.parametrize(
    ("servers", "processes", "turns"), [(0.1, 0.0, 0.02), (0.0, 0.1, 0.02), (0.05, 0.1, 0.2), (0.0, 0.0, 0.1)]
)
def test_the_components_of_variance_are_those_that_were_drawn(servers: float, processes: float, turns: float) -> None:
    random, shape = np.random.default_rng(0), (400, 6, 8)
    logs = (
        random.normal(0, servers, (shape[0], 1, 1))
        + random.normal(0, processes, (*shape[:2], 1))
        + random.normal(0, turns, shape)
    )
    assert components(logs) == pytest.approx({"servers": servers, "processes": processes, "turns": turns}, abs=0.012)


def test_the_widened_interval_holds_an_unseen_bias() -> None:
    missed = equal_arms(0.02, 0.02, trials=200)
    assert missed["plain"] > 0.1
    assert missed["widened"] < 0.06


def test_the_best_of_ten_seems_too_good() -> None:
    best = best_of(10, 1.06, trials=120)
    assert best["seen"] > 1.07
    assert best["told"] == pytest.approx(1.06, abs=0.005)


def test_looks_stop_early_without_wrong_decisions() -> None:
    whole, stopped = looking(1.1, 0.02, 0.0, trials=60).values()
    assert (whole["rounds"], whole["wrong"], stopped["wrong"]) == (40, 0, 0)
    assert stopped["rounds"] < 10
    assert stopped["coverage"] > 0.9
    _, drifting = looking(1.1, 0.05, 0.6, trials=60).values()
    assert drifting["rounds"] > 18
    assert drifting["coverage"] > 0.85  # it would be 0.7 if correlated rounds were not counted for fewer


def test_on_noisy_machines_large_effects_have_the_right_side() -> None:
    equal, large = sides(1.0, 0.2, trials=50), sides(0.32, 0.2, trials=50)
    assert equal["told"] == equal["wrong"] == large["wrong"] == 0
    assert large["told_untrusted"] > 0.8
    assert large["untrusted"] > 0.9
    assert sides(0.8, 0.0, trials=20, pool=recorded())["told"] > 0.8


def test_every_block_of_recorded_rounds_is_a_trial() -> None:
    pool = json.loads((machines.FIGURES / "gate-pool-amd-epyc-avx2-2-cores.json").read_text(encoding="utf-8"))
    rates = error_rates(pool | {"rounds": [10, 9]}, 8, (0.3,))
    assert (rates["trials"], rates["independent_blocks"]) == (3 + 2, 2)
    assert rates["outcomes"]["30%"] == {"worse: throughput": 5}
    assert 6 <= rates["mean_rounds"]["30%"] < 8, "no look decided"


def test_gates_of_drawn_rounds_find_a_slowdown() -> None:
    rates = gate_of_drawn_rounds(0.02, 0.0, rounds=8, trials=3)
    assert rates["outcomes"]["slower"] == {"worse: throughput": 3}


def test_recorded_rounds_are_looked_at_as_drawn_ones_are() -> None:
    pool = recorded()
    assert pool.shape == (3, 207)
    whole, stopped = looking(0.9, 0.0, 0.0, trials=20, pool=pool).values()
    assert (whole["wrong"], stopped["wrong"]) == (0, 0)
    assert 6 <= stopped["rounds"] < 12 < whole["rounds"]
    assert whole["half_width"] < stopped["half_width"]
    assert looking(0.9, 0.0, 0.0, trials=20, pool=pool, consecutive=True)["looks"] != stopped


def test_the_bias_of_a_single_session_is_its_own() -> None:
    ratios = kept(0.03, (0.05,), trials=15)
    assert ratios["one, all"] == pytest.approx(ratios["one, own"])
    ratios = kept(0.03, (0.05, 0.02), trials=15)
    assert ratios["one, all"] != pytest.approx(ratios["one, own"])


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [  # without errors in n gates, the bound is 1 - 0.05 ** (1 / n)
        (
            {"equal": ["passed"] * 11, "slower": ["worse: throughput"] * 60},
            ("0 of 11 gates; with 95% confidence, the rate is at most 24%", "5%"),
        ),
        (
            {"equal": ["worse: memory"], "slower": ["undecided", "passed"]},
            ("1 of 1 gates; with 95% confidence, the rate is at most 100%", "97%"),
        ),
    ],
)
def test_what_complete_gates_support(outcomes: dict[str, list[str]], said: tuple[str, str]) -> None:
    trials = [{"head": head, "outcome": outcome} for head, outcomes_of in outcomes.items() for outcome in outcomes_of]
    equal, slower = bounds(trials)
    assert equal.endswith(said[0])
    assert slower.endswith(f"at most {said[1]}")


def test_figures_name_their_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(torch: str, name: str) -> tuple[Path, dict[str, Any]]:
        software = ENVIRONMENT["software"] | {"torch": torch}
        fingerprint = ENVIRONMENT | {"hash": f"hash of {torch}", "software": software, "relied_on": {}}
        monkeypatch.setattr(environment, "fingerprint", lambda: fingerprint)
        return machines.keep(tmp_path, "", "benchmarks", name, {"median_ratio": 1.0})

    measured("2.11", "one")
    path, content = measured("2.15", "other")
    assert path == tmp_path / "example-cpu-2-0-ghz-avx2-2-cores.json"
    assert json.loads(path.read_text(encoding="utf-8")) == content
    assert content["machine"] == "Example CPU @ 2.0 GHz AVX2 2 cores"
    names = {name: figure["environment"] for name, figure in content["benchmarks"].items()}
    assert names == {"one": "hash of 2.11", "other": "hash of 2.15"}
    versions = {digest: described["software"]["torch"] for digest, described in content["environments"].items()}
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
def test_a_figure_is_printed_beside_its_target(
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
