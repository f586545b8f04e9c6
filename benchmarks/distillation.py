"""Measure what a teacher adds to a student's accuracy, at equal epochs and at equal time, over many seeds.

    python -m benchmarks.distillation [--seeds 24]

The job is scikit-learn's digits. For each seed, the teacher is trained, and then each student in three ways: alone,
with the teacher, and alone for longer. The longer training has as many epochs as fit into the time of the training with
the teacher. To find this number, steps with and without the teacher are timed in pairs before all trainings.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.processes import set_openmp_spins

set_openmp_spins(measures=True)  # as in `python -m pipeline`

import torch
from scipy.special import stdtrit

from benchmarks import machines
from benchmarks.pairs import ratio
from benchmarks.stages import pack
from pipeline import environment, params
from pipeline.plans import Plan, plan
from pipeline.training.assembly import assembled
from pipeline.training.loop import Training

EPOCHS, PAIRS, TIMED_STEPS = 10, 6, 20
TRAIN = {"batch_size": 64, "learning_rate": 0.05, "model": "resnet9", "model_options": {"base_width": 16}}
STUDENTS: dict[str, dict[str, Any]] = {
    "small_cnn": {"model": "small_cnn"},
    "resnet9 with base_width 2": {"model": "resnet9", "model_options": {"base_width": 2}},
}
TAUGHT = {"distillation": {"teacher": "weights.pt", "temperature": 4, "alpha": 0.5}}


class Job:
    """The digits, prepared in ``folder``, on which the teacher and the students train."""

    def __init__(self, folder: Path) -> None:
        self.prepared = folder / "prepared"
        pack({"fetch": {"dataset": "digits"}}, folder / "raw", self.prepared)

    def accuracy(
        self, variant: dict[str, Any], seed: int, epochs: int, weights: Mapping[str, torch.Tensor] | None = None
    ) -> tuple[float, dict[str, torch.Tensor]]:
        """Train with one seed; return the test accuracy and the trained weights. ``weights``: the teacher's weights."""
        made = self._plan(variant, epochs)
        with assembled(made, self.prepared) as assembly, assembly.training(seed, teacher=weights) as training:
            for _ in training.run():
                pass
            assert training.score is not None
            return training.score.accuracy, {key: tensor.clone() for key, tensor in training.model_state.read().items()}

    def step_ratio(self, student: dict[str, Any]) -> dict[str, Any]:
        """Return a step's seconds with the teacher, divided by its seconds without the teacher."""
        with (
            assembled(self._plan(student | TAUGHT, 10**6), self.prepared) as with_teacher,
            assembled(self._plan(student, 10**6), self.prepared) as without_teacher,
            with_teacher.training(0) as taught,
            without_teacher.training(0) as alone,
        ):
            return ratio(lambda: _seconds(taught), lambda: _seconds(alone), PAIRS, warm_up=True)

    def _plan(self, variant: dict[str, Any], epochs: int) -> Plan:
        values = {"train": TRAIN | {"epochs": epochs, "device": "cpu"}, "compare": {"baseline": "tried"}}
        return plan(params.parse(values | {"variants": {"tried": variant}}), "tried", environment.machine())


def _seconds(training: Training) -> float:
    started = time.perf_counter()
    training.advance(TIMED_STEPS)
    return time.perf_counter() - started


def gains(seeds: int) -> dict[str, Any]:
    """Return each student's test accuracies of all seeds, and what the teacher adds to them, in percentage points."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder))
        steps = {name: job.step_ratio(student) for name, student in STUDENTS.items()}
        epochs = {name: round(EPOCHS * step_times["median_ratio"]) for name, step_times in steps.items()}
        teachers: list[float] = []
        by_student: dict[str, dict[str, list[float]]] = {name: {} for name in STUDENTS}
        for seed in range(seeds):
            score, weights = job.accuracy({}, seed, EPOCHS)
            teachers.append(score)
            for name, student in STUDENTS.items():
                scores = {
                    "alone": job.accuracy(student, seed, EPOCHS)[0],
                    "taught": job.accuracy(student | TAUGHT, seed, EPOCHS, weights)[0],
                    "alone_for_longer": job.accuracy(student, seed, epochs[name])[0],
                }
                for training_kind, accuracy in scores.items():
                    by_student[name].setdefault(training_kind, []).append(accuracy)
                print(seed, name, scores, flush=True)
    students = {
        name: {
            "step_seconds_ratio": steps[name],
            "epochs_at_equal_time": epochs[name],
            "test_accuracies": ways,
            "gain_points": _gain(ways["taught"], ways["alone"]),
            "gain_points_at_equal_time": _gain(ways["taught"], ways["alone_for_longer"]),
        }
        for name, ways in by_student.items()
    }
    return {"train": TRAIN, "epochs": EPOCHS, **TAUGHT, "teacher_test_accuracies": teachers, "students": students}


def _gain(taught: list[float], alone: list[float]) -> dict[str, float]:
    """Return the mean over seeds of ``taught`` - ``alone``, and its 95% t interval, in percentage points."""
    differences = [100 * (a - b) for a, b in zip(taught, alone, strict=True)]
    mean, count = statistics.mean(differences), len(differences)
    half = float(stdtrit(count - 1, 0.975)) * statistics.stdev(differences) / math.sqrt(count)
    return {"mean": mean, "low": mean - half, "high": mean + half}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.distillation", description="Measure what a teacher adds to a student's accuracy."
    )
    parser.add_argument("--seeds", type=int, default=24, metavar="N", help="train seeds 0 to N - 1; N is at least 2")
    arguments = parser.parse_args()
    figure = gains(arguments.seeds)
    for name, gain in figure["students"].items():
        for key in ("gain_points", "gain_points_at_equal_time"):
            print(f"{name:28} {key:28} {gain[key]['mean']:+.2f} ({gain[key]['low']:.2f} to {gain[key]['high']:.2f})")
    machines.keep(machines.FIGURES, "distillation-", "benchmarks", "distillation", figure)


if __name__ == "__main__":
    main()
