"""``make gpu-check``: accept or refuse a new GPU machine, in about ten minutes on one GPU.

    python -m benchmarks.gpu_check [--report gpu-check.md] [--rehearse]

The check runs the GPU tests, the default job with its energy, and a ready-made variant of each kind that the machine
can run. It also runs ``verify``, measures transfers (``benchmarks.transfers``), and runs the benchmarks that are
meaningful on a GPU. It continues after a failed step, prints a line for each step, and writes everything that a bug
report needs to one small file. The exit code is the number of failed steps (at most 100), or 2 without a GPU. All steps
run in a temporary copy of the checkout. A rehearsal (``--rehearse``) tries out the check on any machine, with little
data.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.pairs import ROOT, Checkout
from pipeline import environment, files, params, plans
from pipeline.errors import ConfigError, redacted
from pipeline.params import Config, Machine, Variant

KINDS = ("parallelism", "precision", "compile", "cuda_graph", "activation_checkpointing", "activation_offload")
"""Settings of variants. For each of these settings that the machine can run, the check runs a ready-made variant. For
the first two settings, it runs a variant for each value."""
MOST = 100
"""Highest exit code; codes above 124 have other meanings in shells."""
_SECRET = re.compile(r"TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH", re.IGNORECASE)


@dataclass(frozen=True)
class Step:
    """A command to run. The step passes if the command exits with 0 within ``limit`` seconds and prints ``says``."""

    name: str
    command: tuple[str, ...]
    limit: float
    params: Mapping[str, Any] | None = None
    """Content of params.yaml from this step on; None leaves the file unchanged."""
    says: str = ""


@dataclass(frozen=True)
class Outcome:
    step: Step
    seconds: float
    output: str
    failed: str | None
    """Why the step failed; None if it passed."""

    def __str__(self) -> str:
        cells = (f"{self.step.name:34}", "no " if self.failed else "yes", f"{self.seconds:7.1f}", self.failed or "")
        return " | ".join(cells).rstrip(" |")


def steps_of(values: Mapping[str, Any], variants: Mapping[str, Any], rehearse: bool) -> Iterator[Step]:
    """Yield all steps. ``values``: content of params.yaml. ``variants``: the variants to try besides its baseline."""
    python = (sys.executable, "-m")
    yield Step("doctor", (*python, "pipeline", "doctor"), 120, values)
    tests = (*python, "pytest", "-m", "gpu", "--color=no")  # exits with 0 even if all tests are skipped
    yield Step("GPU tests", tests, 600, says="" if rehearse else " passed")
    yield Step("default job", (*python, "dvc", "repro", "--no-run-cache"), 900)
    if environment.machine().gpus > 1:
        yield Step("probe", (*python, "pipeline", "probe"), 300)
        yield Step("scale", (*python, "pipeline", "scale", "ddp", "--minutes", "2"), 900)
    changed = trying(values, variants)
    yield Step("params.yaml with these variants", (*python, "pipeline", "environment"), 120, changed)
    for name in variants:
        yield Step(f"variant {name}", (*python, "pipeline", "train", name), 240)
    yield Step("verify", (*python, "pipeline", "verify"), 600)
    yield Step("transfers", (*python, "benchmarks.transfers"), 120)
    for name in () if rehearse else ("bare_loop", "ledgers"):
        command = (*python, "benchmarks", name, "--figures", "figures")
        yield Step(f"benchmark {name}", command, 400, says=" met ")


def trying(values: Mapping[str, Any], variants: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a params.yaml that trains ``variants`` and the baseline for one epoch each."""
    baseline = values["compare"]["baseline"]
    return {
        **values,
        "train": values["train"] | {"epochs": 1, "seeds": [0]},
        "variants": {baseline: values["variants"][baseline], **variants},
        "bench": values["bench"] | {"ablate": []},
        "profile": {"variants": []},
        "infer": {"variants": []},
    }


def variants_of_each_kind(values: Mapping[str, Any], machine: Machine, sets: Iterable[Path]) -> dict[str, Any]:
    """Return ready-made variants, name -> settings: for each of ``KINDS`` (for each value of the first two kinds), the
    first variant that the machine can run without skipping this setting."""
    config, plain = params.parse(dict(values)), Variant()
    chosen: dict[str, Any] = {}
    seen: set[object] = set()
    for path in sorted(sets):
        for name, requested in yaml.safe_load(path.read_text(encoding="utf-8")).items():
            alone = config.model_copy(update={"variants": {name: Variant.model_validate(requested)}})
            try:
                applied = plans.plan(alone, name, machine).applied
            except ConfigError:  # the variant cannot run here
                continue
            values_of_it = {key: getattr(applied, key) for key in KINDS if getattr(applied, key) != getattr(plain, key)}
            kinds = {(key, value if key in KINDS[:2] else None) for key, value in values_of_it.items()}
            if kinds - seen:
                seen |= kinds
                chosen[name] = requested
    return chosen


def done(step: Step, folder: Path) -> Outcome:
    """Run a step in ``folder``, without any shared tracking server, and end all processes that the step started."""
    if step.params is not None:
        (folder / params.PARAMS_FILE).write_text(yaml.safe_dump(dict(step.params), sort_keys=False), encoding="utf-8")
    started = time.perf_counter()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # dvc.yaml runs `python`
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            step.command,
            cwd=folder,
            env=inherited | {"PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(step.limit)
            failed = f"exit {code}" if code else None
        except subprocess.TimeoutExpired:
            failed = f"not finished after {step.limit:g} s"
        finally:
            for order, patience in ((signal.SIGTERM, 20.0), (signal.SIGKILL, None)):
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):  # all have ended, or need longer
                    os.killpg(process.pid, order)
                    process.wait(patience)
        log.seek(max(0, log.seek(0, os.SEEK_END) - 64_000))
        output = shown(log.read().decode(errors="replace")).rstrip()
    if not failed and step.says not in output:
        failed = f"its output lacks {step.says.strip()!r}"
    if failed:
        failed = f"{failed}: {output.splitlines()[-1][:160] if output else 'there is no output'}"
    return Outcome(step, time.perf_counter() - started, output, failed)


def shown(text: str) -> str:
    """Return ``text`` without user names, passwords and queries in addresses, and without the values of environment
    variables whose names suggest secrets."""
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) >= 6:
            text = text.replace(value, "***")
    return redacted(text)


def page(outcomes: Iterable[Outcome], comparison: Path, rehearse: bool) -> str:
    """Return the results of the check as Markdown, with all that a bug report needs."""
    outcomes = list(outcomes)
    fingerprint = environment.fingerprint()
    facts = {key: fingerprint[key] for key in ("hardware", "software", "settings")}
    failed = sum(outcome.failed is not None for outcome in outcomes)
    parts = [
        f"# GPU check: {failed} of {len(outcomes)} steps failed" + (" (a rehearsal)" if rehearse else ""),
        f"{time.strftime('%Y-%m-%d')}, commit {environment.checked_out()}, Python {sys.version.split()[0]}.",
        "| step | passed | seconds | reason |\n| --- | --- | --- | --- |\n"
        + "\n".join(f"| {str(outcome).replace('`', '')} |" for outcome in outcomes),
        f"```json\n{json.dumps(facts, indent=1)}\n```",
    ]
    for outcome in sorted(outcomes, key=lambda step: step.failed is None):  # failed steps first, with longer logs
        lines = outcome.output.splitlines()[-60 if outcome.failed else -15 :]
        text = "\n".join(line[:300] for line in lines).replace("```", "'''")
        parts.append(f"## {outcome.step.name}\n\n```text\n{text}\n```")
    if comparison.exists():
        parts.append(f"# The default job\n\n{shown(comparison.read_text(encoding='utf-8'))}")
    return "\n\n".join(parts) + "\n"


def check(steps: Iterable[Step], folder: Path, report: Path, rehearse: bool = False) -> int:
    """Run all steps in ``folder``, print each when it is done, and keep ``report`` up to date. Return the number of
    steps that failed, at most ``MOST``."""
    outcomes: list[Outcome] = []
    for step in steps:
        outcomes.append(done(step, folder))
        print(outcomes[-1], flush=True)
        files.write_text(report, page(outcomes, folder / "reports" / "comparison.md", rehearse))
    failed = sum(outcome.failed is not None for outcome in outcomes)
    print(f"{failed} of {len(outcomes)} steps failed; {report} has the details for a bug report")
    return min(failed, MOST)


def settings(config: Config, rehearse: bool) -> dict[str, Any]:
    """Return the content of the copy's params.yaml. The job runs only on GPUs, and uses this checkout's raw files if
    there are any.

    For a rehearsal, the job is small, runs on any machine, and needs no network.
    """
    values: dict[str, Any] = config.model_dump(mode="json")
    values["bench"] |= {"energy": True, "window_seconds": 3.0}  # NVML's counter needs long windows
    fetch = values["fetch"]
    if rehearse:
        fetch |= {"dataset": "digits", "mirror": None}
        values["train"]["batch_size"] = 64
        values["bench"] |= {"max_rounds": 1, "window_seconds": 0.05}
        return trying(values, {})
    values["train"]["device"] = "cuda"
    for key in ("mirror", "image_folder"):
        if fetch[key] and "://" not in fetch[key]:
            fetch[key] = str(ROOT / Path(fetch[key]).expanduser())
    raw = ROOT / "data" / "raw" / fetch["dataset"]
    if raw.is_dir() and not fetch["mirror"] and not fetch["image_folder"]:
        fetch["mirror"] = str(raw)
    return values


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--report",
        type=Path,
        default=ROOT / "gpu-check.md",
        metavar="FILE",
        help="write the report to this file",
    )
    parser.add_argument("--rehearse", action="store_true", help="run the check on any machine, with little data")
    parsed = parser.parse_args(arguments)
    machine = environment.machine()
    if not machine.gpus and not parsed.rehearse:
        print(
            "error: this machine shows no GPU: install NVIDIA's driver (`nvidia-smi` must list the GPU; a container "
            "needs `--gpus all`), or add --rehearse to try the check on the CPU.",
            file=sys.stderr,
        )
        return 2
    values = settings(params.load(ROOT / params.PARAMS_FILE), parsed.rehearse)
    variants = variants_of_each_kind(values, machine, (ROOT / "variants").glob("*.yaml"))
    with tempfile.TemporaryDirectory() as folder:
        Checkout(Path(folder), ["."], **values).commit()
        return check(
            steps_of(values, variants, parsed.rehearse), Path(folder), parsed.report.resolve(), parsed.rehearse
        )


if __name__ == "__main__":
    sys.exit(main())
