"""Each finding of doctor, and the printed report."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import yaml

from pipeline import cli, environment, tracking
from pipeline.environment import hardware
from pipeline.errors import ConfigError
from pipeline.params import Machine, load
from pipeline.tools import doctor
from pipeline.tools.doctor import Finding
from tests.commands import executable
from tests.conftest import ROOT
from tests.workspaces import CPU_ONLY, furnish

TWO = Machine(gpus=2, gpu_native_bf16=True, cpu_native_bf16=False)
H100 = {"name": "H100", "compute_capability": "9.0", "memory_gib": 80, "power_limit_watts": 700}


@pytest.fixture(autouse=True)
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a directory that is no git repository the current one, and hide this machine's own settings."""
    for name in ("CUDA_VISIBLE_DEVICES", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CEILING_DIRECTORIES": str(tmp_path),
        "DVC_NO_ANALYTICS": "1",
        **{f"GIT_{role}_{what}": "test@example.org" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
        **{f"DVC_{kind}_DIR": str(tmp_path) for kind in ("GLOBAL_CONFIG", "SYSTEM_CONFIG", "SITE_CACHE")},
    }.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "checkout").mkdir()
    monkeypatch.chdir(tmp_path / "checkout")
    return tmp_path / "checkout"


def job(variants: dict[str, Any] | None = None, **sections: Any) -> None:
    """Write params.yaml."""
    text = yaml.safe_dump({"variants": variants or {"baseline": {}, "ddp": {"parallelism": "ddp"}}, **sections})
    Path("params.yaml").write_text(text, encoding="utf-8")


Report = Callable[[str], str]


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Report:
    """Return a function that returns what doctor prints of one check, with single spaces between the words."""

    def report(check: str) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(doctor, "CHECKS", {check: doctor.CHECKS[check]})
            code = cli.main(["doctor"])
        printed = " ".join(capsys.readouterr().out.split())
        assert code == ("PROBLEM" in printed)
        return printed

    return report


BF16 = {"baseline": {"precision": "bf16"}}


@pytest.mark.parametrize(
    ("variants", "machine", "said"),
    [
        ({}, TWO, "ok params.yaml all variants run here: baseline on 1 GPU, ddp on 2 GPUs"),
        ({"baseline": {}, "half": {"precision": "fp16"}}, CPU_ONLY, "PROBLEM params.yaml variants.half.precision"),
        (BF16, CPU_ONLY, "warning params.yaml baseline: bf16 is skipped: this CPU"),
        ({"a": {}}, TWO, "PROBLEM params.yaml params.yaml: compare.baseline: found 'baseline'"),
        (None, TWO, "PROBLEM params.yaml params.yaml is missing"),
    ],
)
def test_the_variants_of_params_yaml(
    variants: dict[str, Any] | None, machine: Machine, said: str, monkeypatch: pytest.MonkeyPatch, report: Report
) -> None:
    monkeypatch.setattr(environment, "machine", lambda *_: machine)
    if variants is not None:
        job(variants)
    printed = report("params.yaml")
    assert said in printed
    assert (" -> " in printed) is ("0 problems, 0 warnings" not in printed), "what is wrong has a remedy"


SPARSE = """
import threading
import torch
from torch import nn

class net(nn.Module):
    def __init__(self, classes, hidden, **_):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, classes))
        self.held = getattr(self, "lock", None)

    def forward(self, images):
        bits = (images.flatten(1) > 0).long()
        return nn.functional.embedding(bits, self.weight, sparse=True).sum(1)

"""


def test_the_job_s_own_parts_are_tried(checkout: Path, report: Report) -> None:
    net = "lambda classes, hidden, **_: nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.Linear(hidden, classes))"
    (checkout / "nets.py").write_text(f"from torch import nn\n\nprint('words')\nnet = {net}\n")

    def parts(hidden: int | str = 4, batch_size: int = 2, **settings: Any) -> str:
        train = {"model": "nets:net", "model_options": {"hidden": hidden}, "batch_size": batch_size} | settings
        job({"baseline": {}}, fetch={"dataset": "digits"}, prepare={"train_limit": 5}, train=train)
        return report("model, data")

    alike = "on samples like those of digits, which are not prepared -> dvc repro prepare"
    assert f"ok model, data nets:net has {64 * 4 + 4 + 4 * 10 + 10} parameters {alike}" in parts()
    furnish(load())
    assert f"ok model, data nets:net has {64 * 4 + 4 + 4 * 10 + 10} parameters on digits" in parts()
    assert "parameters, of which 50 train, on digits" in (frozen := parts(frozen=["1.*"]))
    once = "could be computed once and stored"
    assert once in frozen
    assert once not in parts(frozen=["1.*"], augment={"flip": True})
    assert once not in parts(frozen=["1.weight"])  # its bias trains
    raising = parts("many")
    assert "PROBLEM model, data train.model: nets:net raised TypeError: " in raising
    assert "nets.py, line 4, in <lambda>" in raising
    assert "-> correct params.yaml, or your module that the message names" in raising
    assert "train.batch_size: found 6, but digits has 5" in parts(batch_size=6)
    (checkout / "nets.py").write_text(SPARSE)
    sparse = parts()
    assert "PROBLEM model, data train.model: nets:net fails in a step of 6 samples: " in sparse
    assert "sparse" in sparse
    (checkout / "nets.py").write_text(SPARSE.replace("sparse=True", "sparse=False") + "    lock = threading.Lock()\n")
    assert "PROBLEM model, data train.model: nets:net cannot be copied (cannot pickle '_thread.lock'" in parts()
    job({"baseline": {}}, trian={})
    assert report("model, data") == "0 problems, 0 warnings", "the check of params.yaml reports the error"


def test_patterns_and_checkpointing_are_checked_before_the_data() -> None:
    variants: dict[str, Any] = {"baseline": {}, "low": {"lora": {"targets": ["*.attn"]}}}
    variants |= {"saving": {"activation_checkpointing": True}, "part": {"activation_checkpointing": 0.5}}

    def told(dataset: str = "synthetic", **train: Any) -> list[str]:
        fetch = {"dataset": dataset, "synthetic": {"shape": [5]}, "arrays": "nets:samples"}
        job(variants, fetch=fetch, train={"model": "mlp"} | train)
        return [finding.fact for finding in doctor.parts()]

    fits, *_, low, part, saving = told(frozen=["0.*", "1.*"])
    assert (
        fits
        == "mlp has 5,194 parameters, of which 650 train, on samples like those of synthetic, which are not prepared"
    )
    has = "which has 0.0, 1.0, 2, in its parts 0, 1, 2."
    assert low == (
        f"variants.low.lora.targets: '*.attn' matches no linear layer with a weight of its own in Sequential, {has}"
    )
    assert "variants.saving.activation_checkpointing: found true, but no block of Sequential ran again" in saving
    assert "variants.part.activation_checkpointing: found 0.5, but with all 2 blocks checkpointed, Sequ" in part
    assert part.endswith("times its activations' bytes; allowed: false.")
    assert not any("variants.saving" in fact for fact in told())
    lists: dict[str, Any] = {"frozen": ["head.*"], "no_decay": ["head.*", "vectors"], "lr_factors": {"head.*": 2.0}}
    for key, value in lists.items():
        with pytest.raises(ConfigError, match=rf"train.{key}: 'head.\*' matches no parameter of mlp.* parts 0, 1, 2\."):
            told(**{key: value})
    assert told("arrays") == ["mlp exists; to build it, the data must be prepared"]


MISMATCH = hardware.GPUs([], None, "NVML says: Driver/library version mismatch")
ON_CUDA = {"init": lambda: None, "device_count": lambda: 2, "get_device_name": lambda _: "H100"}


@pytest.mark.parametrize(
    ("shown", "has_gpus", "device", "visible", "said"),
    [
        (hardware.GPUs([]), False, "auto", None, "- GPUs no NVIDIA GPU here: the job runs on the CPU"),
        (hardware.GPUs([]), False, "cuda", None, "PROBLEM GPUs train.device is cuda, but there is no NVIDIA GPU"),
        (hardware.GPUs([]), True, "auto", None, "CUDA shows none -> install driver 580 or newer on the host"),
        (hardware.GPUs([]), True, "auto", "7", "warning GPUs CUDA_VISIBLE_DEVICES='7' hides all GPUs"),
        (hardware.GPUs([]), True, "cuda", "7", "PROBLEM GPUs CUDA_VISIBLE_DEVICES='7' hides all GPUs -> unset"),
        (MISMATCH, True, "auto", None, "-> reboot the host"),
        (hardware.GPUs([], None, "CUDA's error 802"), True, "auto", None, "PROBLEM GPUs CUDA's error 802 -> run"),
        (hardware.GPUs([H100, H100], "580.1"), True, "auto", None, "ok GPUs torch computes on 2 x H100; the "),
        (hardware.GPUs([H100], "580.1"), True, "auto", None, "PROBLEM GPUs torch computes on 2 x H100; "),
        (hardware.GPUs([H100, H100]), True, "cpu", None, "for CUDA 13.2 0 problems"),
    ],
)
def test_gpus(
    shown: hardware.GPUs,
    has_gpus: bool,
    device: str,
    visible: str | None,
    said: str,
    checkout: Path,
    monkeypatch: pytest.MonkeyPatch,
    report: Report,
) -> None:
    for name, kind in (("01:00.0", "0x030200" if has_gpus else "0x020000"), ("01:00.1", "0x040300")):
        (checkout / "pci" / name).mkdir(parents=True)
        (checkout / "pci" / name / "vendor").write_text("0x10de\n", encoding="ascii")
        (checkout / "pci" / name / "class").write_text(f"{kind}\n", encoding="ascii")
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for name, answer in ON_CUDA.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setattr(torch, "ones", lambda _, device: torch.zeros(1))  # noqa: ARG005
    monkeypatch.setattr(hardware, "visible_gpus", lambda: shown)
    monkeypatch.setattr(doctor, "PCI", checkout / "pci")
    monkeypatch.setattr(doctor, "APART", ())
    job(train={"device": device})
    assert said in report("GPUs")


def test_a_gpu_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch, report: Report) -> None:
    def fails() -> None:
        raise RuntimeError("no kernel\nimage is available")

    monkeypatch.setattr(hardware, "visible_gpus", lambda: hardware.GPUs([H100]))
    monkeypatch.setattr(torch.cuda, "init", fails)
    monkeypatch.setattr(doctor, "APART", ())
    assert "PROBLEM GPUs RuntimeError: no kernel image is available -> install a torch that" in report("GPUs")


@pytest.mark.parametrize(
    ("device", "said"), [("auto", "- GPUs no NVIDIA GPU"), ("cuda", "PROBLEM GPUs this build of torch cannot use GPUs")]
)
def test_a_torch_without_cuda(
    device: str, said: str, monkeypatch: pytest.MonkeyPatch, checkout: Path, report: Report
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(hardware, "visible_gpus", lambda: hardware.GPUs([]))
    monkeypatch.setattr(doctor, "PCI", checkout / "none")
    monkeypatch.setattr(doctor, "APART", ())
    job(train={"device": device})
    assert f", for CPUs {said}" in report("GPUs")


@pytest.mark.parametrize(
    ("check", "different", "said"),
    [
        ("CPU", {"cores": 2}, "ok CPU 2 of 8 cores"),
        ("CPU", {"cores": 1.5}, "warning CPU 1.5 of 8 cores; 2 processes that train together"),
        ("CPU", {"load": 4.0}, "ok CPU 4.0 threads used or awaited the 8 cores in the last minute"),
        ("CPU", {"load": 5.0}, "warning CPU 5.0 threads used or awaited the 8 cores in the last minute; other"),
        ("memory", {}, "ok memory 64.0 GiB free"),
        ("memory", {"limit": 3}, "warning memory 3.0 GiB free; 2 training processes may need 4.0 GiB"),
        ("shared memory", {}, "ok shared memory /dev/shm: 100.0 GiB of 1000.0 GiB free"),
        ("shared memory", {"disk": 0.5}, "warning shared memory /dev/shm: 512 MiB of 1000.0 GiB free; NCCL"),
        ("work tree", {}, "ok work tree 100.0 GiB free for "),
        ("work tree", {"disk": 0.5}, "PROBLEM work tree 512 MiB free for "),
        ("work tree", {"disk": 3}, "warning work tree 3.0 GiB free for "),
    ],
)
def test_the_machine(
    check: str, different: dict[str, float], said: str, monkeypatch: pytest.MonkeyPatch, report: Report
) -> None:
    """Sizes are in GiB."""
    facts = {"cores": 8, "load": 1.0, "limit": 1000, "disk": 100} | different
    usage = SimpleNamespace(total=1000 * 2**30, free=int(facts["disk"] * 2**30))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(environment, "cores", lambda: facts["cores"])
    monkeypatch.setattr(environment, "machine", lambda *_: CPU_ONLY)
    monkeypatch.setattr(environment, "memory_limits", lambda: [int(facts["limit"] * 2**30)])
    monkeypatch.setattr(psutil, "getloadavg", lambda: (facts["load"], 0.0, 0.0))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * 2**30))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    job()
    assert said in report(check)


def test_a_system_without_shared_memory(monkeypatch: pytest.MonkeyPatch, report: Report) -> None:
    monkeypatch.setattr(doctor, "SHARED_MEMORY", Path("/none"))
    assert "- shared memory this system has no /none" in report("shared memory")


def test_a_work_tree_that_cannot_be_written_to(monkeypatch: pytest.MonkeyPatch, checkout: Path, report: Report) -> None:
    for name in ("models", "data"):
        (checkout / name).mkdir()
    (checkout / "dvc.lock").touch()
    monkeypatch.setattr(os, "access", lambda path, _: path not in ("dvc.lock", "models"))
    assert f"cannot write to models, dvc.lock in {checkout} -> sudo chown" in report("work tree")


def git(*arguments: str) -> None:
    subprocess.run(["git", *arguments], check=True, capture_output=True)


def test_git(checkout: Path, monkeypatch: pytest.MonkeyPatch, report: Report) -> None:
    assert "PROBLEM git fatal: not a git repository" in (said := report("git"))
    assert "-> git init, or start from a clone" in said
    git("init", "--quiet")
    assert "warning git there is no commit yet" in report("git")
    git("commit", "--quiet", "--allow-empty", "--message", "first")
    assert "ok git at commit " in report("git")
    with monkeypatch.context() as foreign:
        foreign.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # git's own way to test this
        assert '-> git config --global --add safe.directory "$PWD"' in report("git")
    monkeypatch.setenv("PATH", str(checkout))
    assert "-> install or repair git" in report("git")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("", ["ok DVC the cache is {here}/.dvc/cache/files/md5", "- DVC there is no default remote"]),
        ("[core]\n remote = nas\n['remote \"nas\"']\n url = s3://t0ken@nas/x\n", ["remote is nas (s3://***@nas/x)"]),
        ("[cache\n", ["PROBLEM DVC ", "-> see `dvc doctor`"]),
        (None, ["PROBLEM DVC NotDvcRepoError", "python -m pipeline init writes params.yaml and .dvc"]),
    ],
)
def test_dvc(config: str | None, said: list[str], checkout: Path, report: Report) -> None:
    git("init", "--quiet")
    if config is not None:
        (checkout / ".dvc").mkdir()
        (checkout / ".dvc/config").write_text(config, encoding="utf-8")
    printed = report("DVC")
    for words in said:
        assert words.format(here=checkout) in printed


def test_the_tracking_store() -> None:
    """The check answers even without params.yaml."""
    expected = tracking.health(Path(), "training")
    assert list(doctor._apart("tracking")) == [Finding("ok", expected.fact)]


@pytest.mark.parametrize(
    ("program", "findings"),
    [
        ('echo \'["ok", "x"]\'; exec sleep 300', [Finding("ok", "x"), Finding("warning", "no answer within 2 s")]),
        ("echo the reason >&2; exit 3", [Finding("PROBLEM", "the reason")]),
        ("exit 3", [Finding("PROBLEM", "the process ended with 3")]),
        # By such arguments, the tests on simulated GPUs recognise a process of the pipeline.
        ('echo "$*" >&2; exit 3', [Finding("PROBLEM", "-m pipeline.tools.doctor GPUs")]),
    ],
)
def test_a_check_that_hangs_or_crashes(
    program: str, findings: list[Finding], checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = checkout / "python"
    executable(python, f"#!/bin/sh\n{program}\n")
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(doctor, "SECONDS", 2.0)
    assert list(doctor._apart("GPUs")) == findings


def test_each_broken_thing_is_a_line(checkout: Path) -> None:
    """Without params.yaml, torch, git and a DVC repository, and with a server that is down, doctor prints a report, not
    a traceback."""
    broken = checkout / "broken"
    broken.mkdir()
    for name in ("torch", "dvc"):
        (broken / f"{name}.py").write_text("raise ImportError('broken')", encoding="utf-8")
    (broken / "sitecustomize.py").write_text(f"import sys; sys.path.insert(0, {str(broken)!r})", encoding="utf-8")
    variables = {
        "PYTHONPATH": f"{broken}{os.pathsep}{ROOT}",
        "PATH": str(broken),
        "MLFLOW_TRACKING_URI": "http://127.0.0.1:1",
    }
    program = "import sys; from pipeline import cli; sys.exit(cli.main(['doctor']))"
    done = subprocess.run([sys.executable, "-c", program], env=os.environ | variables, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
    problems = [line.split("  ")[1].strip() for line in done.stdout.splitlines() if line.startswith("PROBLEM")]
    assert problems == ["params.yaml", "GPUs", "git", "DVC", "tracking"]
    assert done.stdout.count("         -> ") >= len(problems)


def test_no_secret_is_shown_and_lines_fit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command = "git config --global --add safe.directory /a/very/long/path/" + "x" * 90

    def check() -> Iterator[Finding]:
        yield Finding("warning", "word " * 60, command)
        raise ZeroDivisionError("no answer from https://t0ken@host/x?key=t0ken")

    monkeypatch.setattr(doctor, "CHECKS", {"memory": check, "disk": lambda: iter([Finding("ok", "fine")])})
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if "x" * 90 not in line) <= 80
    assert any(line.endswith("/a/very/long/path/" + "x" * 90) for line in lines)
    assert [line.index("fine") for line in lines if "fine" in line] == [lines[0].index("word")], "aligned"
    assert "ZeroDivisionError: no answer from https://***@host/x?***" in " ".join(" ".join(lines).split())
    assert lines[-1] == "1 problem, 1 warning"
