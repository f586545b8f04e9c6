"""Check that two commits behave in the same way, for example after a change that only moves or renames code.

    python -m benchmarks.commits OLD NEW [--variants NAME ...]

The check uses a clone of each commit, on this machine. Every ready-made variant trains on the digits, and must end with
the same weights. Both commits' ``compare`` runs on the old commit's results and bench, and must write the same
``comparison.json``. Many commands get valid and invalid input, and must exit with the same code and name the same keys.
The exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
COMMANDS = ("environment", "techniques", "variants", "schema", "predict-memory", "compare", "publish", "gate", "doctor")
PARAMS: dict[str, Any] = {
    "fetch": {"dataset": "digits"},
    "prepare": {"train_limit": 512, "test_limit": 128},
    "train": {"seeds": [0, 1], "epochs": 2, "batch_size": 64, "learning_rate": 0.05},
    "publish": {"live": False},
    "variants": {"baseline": {}},
}
BAD: dict[str, Any] = {
    "train.batch_size": -1, "train.batch_sice": 64, "train.epochs": "many", "train.model": "small_cmm",
    "train.model_options": {"width": 0}, "train.optimizer": "sdg", "train.loss": "nowhere:loss", "train.seeds": [],
    "train.device": "cuda", "train.learning_rate": float("nan"), "fetch.dataset": "digit", "prepare.train_limit": 0,
    "bench.max_minutes": 0, "compare.baseline": "none", "compare.margins.throughput": -0.1, "variants": {},
    "variants.baseline.precision": "bf17", "variants.tried": {"precision": "fp16"}, "variants.a b": {},
    "variants.two": {"parallelism": "ddp", "processes": 0}, "variants.odd": {"parallelism": "ddp", "processes": 3},
    "variants.cut": {"parallelism": "pipeline", "processes": 2}, "variants.mix": {"parallelism": "fsdp", "compile": 1},
    "variants.split": {"gradient_accumulation": 7}, "gate.rounds": 0, "profile.variants": ["none"], "nothing": {},
}  # fmt: skip
"""Path of a key -> a value that is tried there. A few of these values are valid."""


class Checkout:
    """A clone of a commit, with the job of ``PARAMS``."""

    def __init__(self, commit: str, path: Path) -> None:
        self.path = path
        sha = subprocess.check_output(["git", "rev-parse", commit], cwd=ROOT, text=True).strip()
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(path)], check=True)
        subprocess.run(["git", "checkout", "--quiet", sha], cwd=path, check=True)
        self.use(PARAMS)
        for stage in ("environment", "fetch", "prepare"):
            if self.run(stage)[0]:
                raise SystemExit(f"{commit}: {stage} failed: {self.said}")

    def use(self, params: dict[str, Any]) -> None:
        (self.path / "params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")

    def run(self, *arguments: str) -> tuple[int, list[str]]:
        """Run a command of the pipeline; return its exit code and the key paths that its error message names."""
        done = subprocess.run(
            [sys.executable, "-m", "pipeline", *arguments], cwd=self.path, capture_output=True, text=True, check=False
        )
        self.said = done.stderr
        found = re.findall(r"^(?:error: )?(?:params.yaml: )?([\w. -]+):", done.stderr, re.MULTILINE)
        return done.returncode, found if done.returncode else []

    def read(self, name: str) -> Any:
        return json.loads((self.path / name).read_text(encoding="utf-8"))


def ready_made() -> dict[str, dict[str, Any]]:
    """Return name -> settings, for every variant in all sets."""
    texts = (path.read_text(encoding="utf-8") for path in sorted((ROOT / "variants").glob("*.yaml")))
    return {name: values for text in texts for name, values in yaml.safe_load(text).items()}


def weights(checkout: Checkout, name: str, values: dict[str, Any]) -> Any:
    """Train a variant; return the digests of its weights, one per seed, or what ``run`` returned if training failed."""
    params = copy.deepcopy(PARAMS)
    params["variants"][name] = values
    if "optimizer_state" in values:
        params["train"] |= {"optimizer": "adamw", "learning_rate": 0.003}
    checkout.use(params)
    checkout.run("environment")
    ended = checkout.run("train", name)
    return ended if ended[0] else [run["model_sha256"] for run in checkout.read(f"results/{name}.json")["runs"]]


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return ``PARAMS`` with ``value`` at the key ``path``."""
    params = copy.deepcopy(PARAMS)
    *sections, key = path.split(".")
    inner = params
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[key] = value
    return params


def answers(checkout: Checkout) -> Iterator[tuple[str, Any]]:
    """Yield what ``run`` returns for commands on ``PARAMS``, on an unknown variant, and on each value of ``BAD``."""
    checkout.use(PARAMS)
    for command in COMMANDS:
        yield command, checkout.run(command)
    for command in ("train", "profile", "infer", "predict-memory", "promote"):
        yield f"{command} none", checkout.run(command, "none")
    for path, value in BAD.items():
        checkout.use(changed(path, value))
        yield f"{path}: {value}", checkout.run("environment")


def comparison(checkout: Checkout, measured: Path) -> Any:
    """Return the comparison that the checkout's ``compare`` makes from the results and the bench in ``measured``."""
    checkout.use(PARAMS | {"variants": {"baseline": {}, "cut": {"activation_checkpointing": True}}})
    checkout.run("environment")
    for name in ("results", "models", "bench.json", "environment.json"):
        source, target = measured / name, checkout.path / name
        if source != target:
            shutil.rmtree(target, ignore_errors=True)
            (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    ended = checkout.run("compare")
    return ended if ended[0] else checkout.read("reports/comparison.json")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("commits", nargs=2, metavar="COMMIT", help="the old commit, then the new commit")
    parser.add_argument(
        "--variants", nargs="*", default=sorted(ready_made()), metavar="NAME", help="variants to train; default: all"
    )
    arguments = parser.parse_args()
    differing = 0

    def same(what: str, old: Any, new: Any) -> None:
        nonlocal differing
        differing += old != new
        print(f"{what}: {str(old)[:60]}" if old == new else f"{what} DIFFERS: {old} / {new}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        old, new = (
            Checkout(each, Path(folder, name)) for each, name in zip(arguments.commits, ("old", "new"), strict=True)
        )
        for (what, before), (_, after) in zip(answers(old), answers(new), strict=True):
            same(what, before, after)
        for name in arguments.variants:
            values = ready_made()[name]
            same(f"weights of {name}", weights(old, name, values), weights(new, name, values))
        old.use(PARAMS | {"bench": {"max_minutes": 0.1, "window_seconds": 0.2},
                          "variants": {"baseline": {}, "cut": {"activation_checkpointing": True}}})  # fmt: skip
        for command in (["environment"], ["train", "baseline"], ["train", "cut"], ["bench"]):
            if old.run(*command)[0]:
                raise SystemExit(f"{' '.join(command)}: {old.said}")
        same("comparison", comparison(old, old.path), comparison(new, old.path))
    print(f"outcomes that differ: {differing}")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
