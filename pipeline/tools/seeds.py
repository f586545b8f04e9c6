"""Add seeds one at a time, until the accuracy of every variant is decided."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline import results
from pipeline.comparison import summaries
from pipeline.errors import count, say
from pipeline.gate.copies import Copy, dvc
from pipeline.params import PARAMS_FILE, Config, load
from pipeline.report import facts
from pipeline.tools.choices import edit


def add(most: int) -> None:
    """Train what is not up to date. While a look (``stats.confidence_of_tests``) leaves an accuracy undecided, add the
    next seed to params.yaml and train every variant with it, up to ``most`` seeds.

    Finished seeds are not trained again (``checkpoints.finish``). Raises PipelineError if a training fails.
    """
    while True:
        config = load()
        seeds = config.train.seeds
        dvc(Copy(Path.cwd()), "repro", *(results.stage_of(name, values) for name, values in config.variants.items()))
        undecided = _open_accuracies(config, look=len(seeds) < most)
        said = f"undecided: {', '.join(undecided)}" if undecided else "all variants are decided"
        say(f"accuracy with {count(len(seeds), 'seed')}: {said}")
        if not undecided or len(seeds) >= most:
            say("run `dvc repro` for the report")
            return
        _add_seed(seeds)


def _open_accuracies(config: Config, *, look: bool) -> Sequence[str]:
    """Return the undecided variants, with the intervals of their differences in accuracy."""
    measured = [results.read(results.result_file(name), config) for name in config.variants]
    baseline = next(result for result in measured if result.variant == config.compare.baseline)
    others = [result for result in measured if result is not baseline]
    accuracies = summaries.accuracies(others, baseline, config.compare.margins.accuracy, look=look)
    return [
        f"{name} ({facts.interval(accuracy)} points at {100 * accuracy.confidence:g}%)"
        for name, accuracy in accuracies.items()
        if accuracy.decision == "undecided"
    ]


def _add_seed(seeds: list[int]) -> None:
    def change(params: Any) -> None:
        params.setdefault("train", {}).setdefault("seeds", list(seeds)).append(max(seeds) + 1)

    edit(change)
    say(f"added {max(seeds) + 1} to train.seeds in {PARAMS_FILE}")
