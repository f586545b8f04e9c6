"""Weak scaling: every process as many samples as a single device takes, and the learning rate to match."""

from __future__ import annotations

from pipeline.techniques.base import Technique


class WeakScaling(Technique):
    """Changes the job and no part of the step: see ``Plan.train``, which has its batch and learning rate."""

    name = "weak_scaling"
