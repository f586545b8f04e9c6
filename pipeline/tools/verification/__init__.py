"""The command ``verify``: train every variant in miniature, with the user's own model and data, and verify the claims
on which a comparison rests."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

from pipeline import tasks
from pipeline.data.prepared import check_batch
from pipeline.data.prepared import read as read_dataset
from pipeline.distributed import launched_size
from pipeline.errors import PipelineError, say
from pipeline.params import Config, Machine
from pipeline.tools.verification import words
from pipeline.tools.verification.claims import Claim, Verifier, said
from pipeline.training.assembly import planned

__all__ = ["Claim", "Verifier", "run"]


def run(config: Config, machine: Machine, variants: Sequence[str], prepared: Path, *, as_json: bool) -> int:
    """Print the claims of ``variants`` (empty: of all). Return 0 if ``words.hold`` is true for the claims, else 1.
    Raises PipelineError."""
    if launched_size() is not None:
        raise PipelineError(
            "verify: found a launcher's environment, but verify starts the processes itself; run it without a launcher "
            "on one host."
        )
    names = list(variants) or list(config.variants)
    plans = [planned(config, name, machine, prepared) for name in names]
    started = time.monotonic()
    claims: list[Claim] = []
    width = max(map(len, [*names, "variant"]))
    with tempfile.TemporaryDirectory() as folder:
        with redirect_stdout(sys.stderr):  # a user's model may print; stdout is for the table
            task = tasks.of_job(config.train, read_dataset(prepared))
            check_batch(config.train.batch_size, task.dataset.name, len(task.dataset.train))
            task.check()
            task.try_step(task.model())
            verifier = Verifier(config, machine, prepared, task, Path(folder))
        about = {
            "model": config.train.model,
            "dataset": task.dataset.name,
            "seed": config.train.seeds[0],
            "steps": verifier.steps,
            "stochastic": verifier.nature.stochastic,
            "batch_dependent": verifier.nature.batch_dependent,
        }
        if not as_json:
            say(
                f"{about['model']} on {about['dataset']}, seed {about['seed']}: {about['steps']} steps of "
                f"{config.train.batch_size} samples, and {verifier.tested:,} of {len(task.dataset.test):,} test "
                f"samples. The model {said(verifier.nature)}.\n"
            )
            say(words.heading(width))
        total = sum(map(verifier.count, plans))
        say(f"verify: {total} claims; after each claim, the remaining time is estimated", file=sys.stderr)
        for plan in plans:
            for claim in verifier.claims(plan):
                claims.append(claim)
                if not as_json:
                    say("\n".join(words.lines(claim, width)))
                say(words.progress(len(claims), total, time.monotonic() - started), file=sys.stderr)
    seconds = time.monotonic() - started
    say(words.as_json(claims, about | {"seconds": round(seconds, 1)}) if as_json else words.summary(claims, seconds))
    return int(not words.hold(claims))
