"""Show that a commit changes no result: record what two commits do, and compare the records.

    python -m benchmarks.commits record COMMIT FILE [--bench FILE] [--variants NAME ...]
    python -m benchmarks.commits differ FILE FILE

``record`` checks out ``COMMIT`` and trains every variant of params.yaml and variants/ on scikit-learn's digits. It
keeps the hashes of the weights; the verdicts and intervals that the commit's `compare` computes from a recorded bench;
and the exit code and the named key for some wrong settings. Without ``--bench``, it measures the bench first, and keeps
it beside ``FILE``. ``differ`` prints each entry that differs, and exits with their number.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.pairs import ROOT

JOB = {
    "fetch": {"dataset": "digits"},
    "train": {"model": "small_cnn", "optimizer": "adamw", "learning_rate": 0.003, "batch_size": 64, "seeds": [0],
              "epochs": 1},
    "bench": {"max_rounds": 8, "max_minutes": 5.0, "window_seconds": 0.2, "max_foreign_load": 1.0},
    "compare": {"max_spread": 2.0},
    "publish": {"live": False},
}  # fmt: skip
BENCHED = ("baseline", "ddp", "memory")
WRONG: dict[str, dict[str, Any]] = {
    "unknown key": {"train": {"epoch": 1}},
    "wrong type": {"train": {"epochs": "two"}},
    "out of range": {"train": {"batch_size": 0}},
    "unknown model": {"train": {"model": "resnet10"}},
    "unknown data set": {"fetch": {"dataset": "digit"}},
    "unknown technique": {"variants": {"memory": {"precison": "bf16"}}},
    "excluding techniques": {"variants": {"memory": {"parallelism": "ddp", "optimizer_in_backward": True}}},
    "missing baseline": {"compare": {"baseline": "base"}},
    "margin below zero": {"compare": {"margins": {"throughput": -1}}},
}
"""Changes of params.yaml that must be refused."""


class Checkout:
    """A commit's files in a folder of their own, with ``JOB`` in params.yaml."""

    def __init__(self, folder: Path, commit: str) -> None:
        self.folder = folder
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(folder), commit], cwd=ROOT, check=True)
        self.settings = yaml.safe_load((folder / "params.yaml").read_text(encoding="utf-8"))
        read = [self.settings["variants"]]
        read += [yaml.safe_load(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("variants/*.yaml"))]
        self.variants = {name: value for variants in read for name, value in variants.items()}

    def write(self, names: Sequence[str], change: dict[str, Any]) -> None:
        """Write params.yaml with the variants ``names`` and the settings of ``change``."""
        values = copy.deepcopy(self.settings)
        values["variants"] = {name: self.variants[name] for name in names}
        for section, settings in (*JOB.items(), *change.items()):
            values[section] |= settings
        (self.folder / "params.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")

    def run(self, *arguments: str, must: bool = False) -> tuple[int, str]:
        """Run a command of the pipeline; return its exit code and output. ``must``: exit if the command fails."""
        command = [sys.executable, "-m", "pipeline", *arguments]
        done = subprocess.run(command, cwd=self.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if must and done.returncode:
            raise SystemExit(f"{' '.join(arguments)}: {done.stdout}")
        return done.returncode, done.stdout


def key_of(output: str) -> str:
    """Return the part of an error message that names the setting."""
    lines = [line for line in output.splitlines() if re.match(r"(error: )?[\w.]+:", line)]
    return re.split(r": (?!\w+\.)", lines[-1].removeprefix("error: "))[0] if lines else output[-200:]


def intervals(value: Any) -> Iterator[tuple[str, float, float]]:
    """Yield the decision and the bounds of every difference in a part of comparison.json."""
    if isinstance(value, dict):
        low, high = (next((value[key] for key in value if key.startswith(end)), None) for end in ("low", "high"))
        if value.get("decision") and low is not None and high is not None:
            yield value["decision"], round(low, 12), round(high, 12)
        for part in value.values():
            yield from intervals(part)
    elif isinstance(value, list):
        for part in value:
            yield from intervals(part)


def record(commit: str, file: Path, bench: Path | None, names: list[str]) -> dict[str, Any]:
    """Return what ``commit`` does; the module's docstring says what this is."""
    with tempfile.TemporaryDirectory() as folder:
        checkout = Checkout(Path(folder, "checkout"), commit)
        try:
            checkout.write(BENCHED, {})
            for stage in ("environment", "fetch", "prepare"):
                checkout.run(stage, must=True)
            weights = {name: trained(checkout, name) for name in names or checkout.variants}
            checkout.write(BENCHED, {})
            shutil.rmtree(checkout.folder / "results")
            for arguments in (("environment",), *(("train", name) for name in BENCHED)):
                checkout.run(*arguments, must=True)
            checkout.run("bench", must=True)
            own = checkout.folder / "bench.json"
            if bench:  # its samples count, with the keys and the environment that this commit's compare expects
                measured, recorded = (json.loads(path.read_text(encoding="utf-8")) for path in (own, bench))
                expected = {key: measured[key] for key in ("keys", "environment")}
                own.write_text(json.dumps(recorded | expected), encoding="utf-8")
            else:
                shutil.copy(own, file.with_suffix(".bench.json"))
            checkout.run("compare", must=True)
            report = json.loads((checkout.folder / "reports" / "comparison.json").read_text(encoding="utf-8"))
            verdicts = {
                row["variant"]: [row.get("verdict"), sorted(map(list, set(intervals(row))))]
                for row in report["variants"]
            }
            refusals = {}
            for name, change in WRONG.items():
                checkout.write(BENCHED, change)
                code, output = checkout.run("plan")
                refusals[name] = [code, key_of(output)]
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(checkout.folder)], cwd=ROOT, check=True)
    return {"weights": weights, "verdicts": verdicts, "refusals": refusals}


def trained(checkout: Checkout, name: str) -> list[Any]:
    """Train a variant; return the exit code and the hashes of the weights, or what the error names."""
    checkout.write(list(dict.fromkeys(("baseline", name))), {})
    checkout.run("environment")
    code, output = checkout.run("train", name)
    if code:
        return [code, key_of(output)]
    result = json.loads((checkout.folder / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return [code, [run["model_sha256"] for run in result["runs"]]]


def differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each entry that only one record has, or that differs."""
    for part in before:
        for name in before[part] | after[part]:
            old, new = before[part].get(name), after[part].get(name)
            if old != new:
                yield f"{part}, {name}: {old} -> {new}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.commits", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("commit")
    recording.add_argument("file", type=Path)
    recording.add_argument("--bench", type=Path)
    recording.add_argument("--variants", nargs="*", default=[])
    differing = commands.add_parser("differ")
    differing.add_argument("files", type=Path, nargs=2)
    arguments = parser.parse_args()
    if arguments.command == "record":
        content = record(arguments.commit, arguments.file, arguments.bench, arguments.variants)
        arguments.file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        return 0
    before, after = (json.loads(file.read_text(encoding="utf-8")) for file in arguments.files)
    lines = list(differences(before, after))
    print(*lines, sep="\n")
    print(f"{sum(map(len, before.values()))} entries, {len(lines)} differ")
    return len(lines)


if __name__ == "__main__":
    raise SystemExit(main())
