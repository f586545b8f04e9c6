"""Each finding of doctor, and the whole report.

The sentences are in one golden file, ``tests/data/doctor.txt``: doctor's output for made-up machines. After an
intended change, renew the file with ``RENEW=1 python -m pytest tests/test_doctor.py -k golden`` and read the diff. The
other tests check a finding's status and subject.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest

from pipeline import cli, environment, tracking
from pipeline.errors import redacted
from pipeline.params import Machine, parse
from pipeline.plans import plans
from pipeline.tools import doctor
from pipeline.tools.doctor import facts, findings
from pipeline.tools.doctor.facts import Answer, Facts, Job
from pipeline.tools.doctor.findings import Finding
from tests.servers import serving

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "data" / "doctor.txt"

LAPTOP = Machine(gpus=0, gpu_native_bf16=False, cpu_native_bf16=True)
TWO = Machine(gpus=2, gpu_native_bf16=True, cpu_native_bf16=False)


def driver(*gpus: list[str] | None, version: str = "580.65.06", cuda: str = "13.0") -> Answer:
    return Answer({"version": version, "cuda": cuda, "gpus": [*gpus]})


def torch(failure: str = "", **found: Any) -> Answer:
    known = {"version": "2.15.0+cu132", "cuda": "13.2", "gpus": 2, "names": ["H100", "H100"]}
    return Answer(known | found, failure)


GIT = Answer({"commit": "1a2b3c4"})
NO_DRIVER = Answer({}, "NVMLError_LibraryNotFound: NVML Shared Library Not Found")
TOO_OLD = "The NVIDIA driver on your system is too old (found version 12020)."
CPU_TORCH = Answer({"version": "2.15.0+cpu", "cuda": None})
LATE = Answer({}, "no answer within 60 s")
DVC = Answer({"cache": "/.dvc/cache/files/md5", "remote": None, "url": ""})
PARTS = Answer({"model": "small_cnn", "parameters": 21_840, "data": "digits, 1,438 training samples"})
WELL = Answer({"well": True, "found": "the embedded store mlflow.db", "remedy": ""})


def job(machine: Machine = LAPTOP, variants: str = "baseline ddp", **train: Any) -> Job:
    about = {"baseline": {}, "ddp": {"parallelism": "ddp"}}
    config = parse({"train": train, "variants": {name: about[name] for name in variants.split()}})
    return Job(config, plans=plans(config, machine) if machine.gpus or train.get("device") != "cuda" else {})


def known(**different: Any) -> Facts:
    """Return the facts of a laptop without problems, except for ``different``."""
    answers = {"driver": NO_DRIVER, "parts": PARTS, "torch": CPU_TORCH, "git": GIT, "store": WELL, "dvc": DVC}
    return replace(Facts(Path("/"), job(), planned_gpus=0, **answers), **different)


ON_TWO = {"job": job(TWO), "planned_gpus": 2, "driver": driver(None, None), "torch": torch()}


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide this machine's own settings and hardware."""
    for name in ("CUDA_VISIBLE_DEVICES", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    for name in ("USERNAME", "PASSWORD", "TOKEN"):
        monkeypatch.delenv(f"MLFLOW_TRACKING_{name}", raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "PCI", tmp_path / "no-pci")
    monkeypatch.setattr(doctor, "KERNEL_DRIVER", tmp_path / "no-driver")


Play = Callable[..., None]
Usage = namedtuple("Usage", ["total", "used", "free"])


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Return ``play(cores=2, ...)``, which replaces what the checks read from the system. Sizes are in GiB."""

    def play(
        *, cores: float = 8, load: float = 1, free: float = 64, limit: float | None = None, disk: float = 100,
        shared: tuple[float, float] = (8, 8), mounts: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        def usage(path: Path) -> Usage:
            size, left = shared if path == doctor.SHARED_MEMORY else (1000, disk)
            return Usage(int(size * 2**30), 0, int(left * 2**30))

        mounted = [SimpleNamespace(mountpoint=point, fstype=kind) for point, kind in (mounts or {"/": "ext4"}).items()]
        monkeypatch.setattr(os, "cpu_count", lambda: 8)
        monkeypatch.setattr(os, "getuid", lambda: 1000)
        monkeypatch.setattr(os, "access", lambda *_: True)
        monkeypatch.setattr(environment, "cores", lambda: cores)
        monkeypatch.setattr(psutil, "getloadavg", lambda: (load, 0.0, 0.0))
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=int(free * 2**30)))
        monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounted)  # noqa: ARG005
        monkeypatch.setattr(environment, "memory_limits", lambda: [int(limit * 2**30)] if limit else [])
        monkeypatch.setattr(shutil, "disk_usage", usage)

    return play


def test_a_report_is_as_in_the_golden_file(play: Play) -> None:
    """The top of this file says how to renew the golden file."""
    skipped = {"bf16": "this CPU has no native bf16", "GPU": "CUDA's error 802", "ema": "it needs what is not there"}
    fewer = {"1 of 3 GPUs": "train.batch_size 256 is shared out evenly among 2 at most"}
    plan = job().plans["baseline"]
    several = {
        "one": plan.model_copy(update={"skipped": skipped}),
        "two": plan.model_copy(update={"skipped": fewer}),
    }
    why_not = "variants.fp16.precision: found 'fp16', but it needs a GPU; take it out."
    broken = Job(job().config, plans=several, refused={"fp16": why_not})
    split = driver(["MIG-1"], [], None, version="535.1", cuda="12.2")
    remote = {"cache": "/proc/cache", "remote": "s3", "url": "s3://me:secret@bucket"}
    scenes: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "a laptop": ({}, {}),
        "two GPUs": ({**ON_TWO, "dvc": Answer(DVC.found | {"remote": "nas", "url": "/nas", "exists": False})}, {}),
        "a container that was started without much": (
            {
                "job": job(TWO), "planned_gpus": 2, "torch": CPU_TORCH,
                "dvc": Answer({}, "NotDvcRepoError: not inside of a repository"),
                "git": Answer({}, "fatal: detected dubious ownership in repository at '/'"),
            },
            {
                "cores": 1.5, "free": 3, "limit": 2, "disk": 0.2, "shared": (0.0625, 0.0625),
                "mounts": {"/": "overlay"},
            },
        ),
        "a machine with split GPUs and an old driver": (
            {
                **ON_TWO, "job": broken, "planned_gpus": 3, "driver": split,
                "torch": torch(f"RuntimeError: {TOO_OLD}", gpus=0),
                "dvc": Answer(remote, "ConnectionError: no route to host"),
                "store": LATE, "git": Answer({}, "fatal"),
            },
            {"free": 1, "disk": 3, "shared": (1, 0.01), "mounts": {"/": "ext4", "/proc": "nfs"}},
        ),
        "nothing at all": (
            {
                "job": Job(mistakes="params.yaml is missing: run from the top of the checkout."),
                "torch": LATE, "dvc": LATE, "driver": Answer({}, "NVMLError_Unknown: Unknown Error"),
                "store": Answer({}, "ModuleNotFoundError: No module named 'sqlite3'"),
                "git": Answer({}, "fatal: not a git repository"),
            },
            {"shared": (0.0625, 0.0625)},
        ),
    }  # fmt: skip
    reports = []
    for scene, (different, machine_) in scenes.items():
        play(**machine_)
        report = findings.as_text(list(doctor.examine(known(**different))), 100)
        reports.append(f"# {scene}\n\n{report}\n")
    text = "\n".join(reports)
    if os.environ.get("RENEW"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")


def judged(check: Callable[[Facts], Any], **different: Any) -> list[tuple[str, str]]:
    """Return each finding's status and full text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "CHECKS", {name: each for name, each in doctor.CHECKS.items() if each is check})
        return [(each.status, f"{each.found} -> {each.remedy}") for each in doctor.examine(known(**different))]


def assert_judged(check: Callable[[Facts], Any], different: dict[str, Any], *expected: tuple[str, str]) -> None:
    """Assert the findings. ``expected``: each finding's status and subject."""
    found = judged(check, **different)
    assert [status for status, _ in found] == [status for status, _ in expected], found
    assert all(subject in said for (_, said), (_, subject) in zip(found, expected, strict=True)), found


MISMATCH = Answer({}, "NVMLError_LibRmVersionMismatch: Driver/library version mismatch")
UNKNOWN = Answer({}, "NVMLError_Unknown: Unknown Error")
NO_TORCH = Answer({}, "ModuleNotFoundError: No module named 'torch'")
OLD = driver(None, version="535.54.03", cuda="12.2")
LOADING = parse({"variants": {"baseline": {"data_loading": "dataloader", "loader_workers": 4}}})
OVERLAY = {"mounts": {"/": "ext4", "/proc": "overlay"}}


@pytest.mark.parametrize(
    ("check", "status", "subject", "different"),
    [
        (doctor.torch, "problem", "No module named 'torch'", {"torch": NO_TORCH}),
        (doctor.torch, "warning", "but this machine has 1 GPU", {"driver": driver(None)}),
        (doctor.torch, "problem", "but this machine has 1 GPU", {"driver": driver(None), "job": job(device="cuda")}),
        (doctor.torch, "problem", "install a CUDA build", {"job": job(device="cuda")}),
        (doctor.torch, "ok", "CPUs", {"driver": driver(None), "job": job(device="cpu")}),
        (doctor.driver, "not applicable", "train.device is cpu", {"job": job(device="cpu")}),
        (doctor.driver, "problem", "use a machine with a GPU", {"job": job(device="cuda")}),
        (doctor.driver, "warning", "NVIDIA_DRIVER_CAPABILITIES=compute,utility", {**ON_TWO, "driver": NO_DRIVER}),
        (doctor.driver, "problem", "reboot the host", {"driver": MISMATCH}),
        (doctor.driver, "problem", "make repro", {"driver": NO_TORCH}),
        (doctor.driver, "problem", "start a new container", {"driver": UNKNOWN}),
        (doctor.driver, "ok", "CUDA up to 12.2", {**ON_TWO, "driver": OLD}),  # CUDA's compatibility package
        (doctor.cpu, "ok", "2 of 8 cores", {"played": {"cores": 2}}),
        (doctor.memory, "ok", "64.0 GiB free", {"played": {"limit": 100}}),
        (doctor.load, "ok", "4.0 threads used or awaited the 8 cores in the last minute", {"played": {"load": 4}}),
        (doctor.load, "warning", "5.0 threads used or awaited the 8 cores in the last minute; other programs may take",
         {"played": {"load": 5}}),
        (doctor.shared_memory, "problem", "loader's workers",
         {"job": Job(LOADING, plans=plans(LOADING, LAPTOP)), "played": {"shared": (0.1, 0.1)}}),
        (doctor.cache, "ok", ".dvc/cache", {"dvc": DVC}),
        (doctor.cache, "warning", "lost with the container",
         {"dvc": Answer({"cache": "/proc/cache"}), "played": OVERLAY}),
        (doctor.cache, "problem", "make repro", {"dvc": NO_TORCH}),
        (doctor.remote, "problem", "dvc status --cloud", {"dvc": LATE._replace(found=DVC.found | {"remote": "nas"})}),
        (doctor.tracking, "problem", "x -> y", {"store": Answer({"well": False, "found": "x", "remedy": "y"})}),
        (doctor.tracking, "not applicable", "db", {"store": Answer({"well": None, "found": "db", "remedy": ""})}),
    ],
)  # fmt: skip
def test_a_finding_that_is_not_in_the_golden_file(
    check: Callable[[Facts], Any], status: str, subject: str, different: dict[str, Any], play: Play
) -> None:
    play(**different.get("played", {}))
    assert_judged(check, {name: value for name, value in different.items() if name != "played"}, (status, subject))


# params.yaml


@pytest.mark.parametrize(
    ("text", "on", "expected"),
    [
        ("variants: {baseline: {}, ddp: {parallelism: ddp}}", TWO, [("ok", "baseline on 1 GPU, ddp on 2 GPUs")]),
        ("variants: {baseline: {}, fp16: {precision: fp16}}", LAPTOP, [("problem", "variants.fp16.precision")]),
        ("variants: {baseline: {precision: bf16}}", LAPTOP.model_copy(update={"cpu_native_bf16": False}),
         [("warning", "train.without_native: run")]),
        ("{train: {batch_size: 256}, variants: {baseline: {parallelism: ddp}}}", TWO.model_copy(update={"gpus": 3}),
         [("warning", "a multiple of the number of GPUs")]),
        ("variants: {baseline: {}}", LAPTOP.model_copy(update={"why_no_gpu": "CUDA's error 802"}),
         [("warning", "CUDA's error 802")]),
        ("variants: {baseline: {}}", None, []),
    ],
)  # fmt: skip
def test_variants(text: str, on: Machine | None, expected: list[tuple[str, str]], tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text(text, encoding="utf-8")
    read = {"job": facts.read(tmp_path / "params.yaml", on)}
    assert_judged(doctor.params_file, read, *expected)


@pytest.mark.parametrize(
    ("text", "subject"),
    [(None, "cd to the top"), ("variants: [", "is not YAML"), ("{variants: {a: {}}, trian: {}}", "trian: unknown key")],
)
def test_params_that_cannot_be_read(text: str | None, subject: str, tmp_path: Path) -> None:
    if text:
        (tmp_path / "params.yaml").write_text(text, encoding="utf-8")
    read = {"job": facts.read(tmp_path / "params.yaml", LAPTOP)}
    assert_judged(doctor.params_file, read, ("problem", subject))


# torch, driver, GPUs


@pytest.mark.parametrize("by", ["bus", "kernel"])
def test_a_gpu_without_a_driver_or_its_library(by: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, vendor, kind in (("01:00.0", "0x10de", "0x030200"), ("01:00.1", "0x10de", "0x040300")):
        (tmp_path / "pci" / name).mkdir(parents=True)
        (tmp_path / "pci" / name / "vendor").write_text(vendor + "\n", encoding="ascii")
        (tmp_path / "pci" / name / "class").write_text(kind + "\n", encoding="ascii")
    monkeypatch.setattr(doctor, *{"bus": ("PCI", tmp_path / "pci"), "kernel": ("KERNEL_DRIVER", tmp_path)}[by])
    assert_judged(doctor.driver, {}, ("problem", "install driver 580 or newer"))


def test_the_driver_is_asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(error: type[Exception] | Exception) -> Any:
        raise error

    answers = {
        "nvmlInit": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.65.06",
        "nvmlSystemGetCudaDriverVersion_v2": lambda: 13020,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: ["plain", "split"][index],
        "nvmlDeviceGetUUID": lambda handle: f"UUID-{handle}",
        "nvmlDeviceGetMigMode": lambda gpu: fails(pynvml.NVMLError_NotSupported) if gpu == "plain" else [1, 1],
        "nvmlDeviceGetMaxMigDeviceCount": lambda _: 2,
        "nvmlDeviceGetMigDeviceHandleByIndex": lambda _, index: fails(pynvml.NVMLError_NotFound) if index else "first",
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    facts.answer("driver")
    assert json.loads(capsys.readouterr().out) == driver(None, ["UUID-first"], cuda="13.2").found
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: fails(pynvml.NVMLError_LibraryNotFound))
    facts.answer("driver")
    assert json.loads(capsys.readouterr().out) == {"failure": NO_DRIVER.failure}


SPLIT = driver(None, ["MIG-1", "MIG-2"])


@pytest.mark.parametrize(
    ("shown", "different", "expected"),
    [
        ("1", {**ON_TWO, "planned_gpus": 1, "torch": torch(gpus=1)}, [("ok", "CUDA_VISIBLE_DEVICES=1")]),
        (None, {**ON_TWO, "driver": NO_DRIVER}, [("ok", "torch computes on 2")]),
        (None, {**ON_TWO, "driver": NO_DRIVER, "planned_gpus": 0}, [("problem", "torch sees 2")]),
        ("", {**ON_TWO, "planned_gpus": 0}, [("warning", "hides all 2")]),
        ("7", {**ON_TWO, "planned_gpus": 0}, [("warning", "unset CUDA_VISIBLE_DEVICES")]),
        ("", {**ON_TWO, "planned_gpus": 0, "job": job(TWO, device="cuda")}, [("problem", "hides all 2")]),
        (None, {**ON_TWO, "torch": torch(gpus=1)}, [("problem", "torch sees 1")]),
        (None, {**ON_TWO, "torch": torch("no kernel image is available")}, [("problem", "compute capability")]),
        (None, {**ON_TWO, "torch": torch("no answer within 60 s")}, [("problem", "hangs")]),
        (None, {**ON_TWO, "driver": driver(), "planned_gpus": 0, "torch": torch(gpus=0)}, [("problem", "--gpus all")]),
        (None, {**ON_TWO, "torch": torch(TOO_OLD)}, [("problem", "install driver 580 or newer")]),
        (None, {**ON_TWO, "job": job(device="cpu")}, [("not applicable", "see above")]),
        (None, {"driver": driver(None)}, [("not applicable", "see above")]),
        (None, {"driver": driver(None), "torch": LATE}, [("not applicable", "see above")]),
        (None, {**ON_TWO, "driver": SPLIT, "planned_gpus": 1, "torch": torch(gpus=1)},
         [("warning", "CUDA_VISIBLE_DEVICES=MIG-1"), ("ok", "torch computes on 1")]),
        (None, {**ON_TWO, "driver": driver([]), "planned_gpus": 0}, [("problem", "-i 0 -mig 0")]),
        ("MIG-2", {**ON_TWO, "driver": SPLIT, "planned_gpus": 1, "torch": torch(gpus=1)}, [("ok", "=MIG-2")]),
    ],
)  # fmt: skip
def test_gpus(
    shown: str | None, different: dict[str, Any], expected: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert_judged(doctor.gpus, different, *expected)


# CPU, memory, shared memory, disk


def test_shared_memory_that_is_missing_or_shut(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "SHARED_MEMORY", tmp_path / "none")
    assert_judged(doctor.shared_memory, {}, ("problem", "is missing"))
    monkeypatch.setattr(doctor, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert_judged(doctor.shared_memory, {}, ("problem", "cannot be written to"))
    monkeypatch.setattr(psutil, "LINUX", False)
    assert_judged(doctor.shared_memory, {}, ("not applicable", "/dev/shm"))


@pytest.mark.parametrize(
    ("membership", "files", "limits"),
    [
        ("0::/\n", {"memory.max": "max\n"}, []),
        ("0::/pod/box\n", {"pod/memory.max": f"{3 * 2**30}\n", "pod/box/memory.max": "max\n"}, [3 * 2**30]),
        ("4:memory:/box\n3:cpu:/other\n", {"memory/box/memory.limit_in_bytes": "1048576\n"}, [2**20]),
    ],
)
def test_the_memory_limit_of_control_groups(
    membership: str, files: dict[str, str], limits: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "membership").write_text(membership, encoding="utf-8")
    for name, content in files.items():
        (tmp_path / "mount" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mount" / name).write_text(content, encoding="utf-8")
    monkeypatch.setattr(environment.cpus, "CGROUP_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(environment.cpus, "CGROUP_MOUNT", tmp_path / "mount")
    assert sorted(set(environment.memory_limits())) == limits


def test_the_fullest_disk_is_told_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20 if path == small else 2**40))
    cache = Answer({"cache": str(small / "not" / "there")})
    assert_judged(doctor.disk, {"root": tmp_path, "dvc": cache}, ("problem", f"{small / 'not' / 'there'}"))


# the checkout


def test_a_work_tree_that_cannot_be_written_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("models", "data"):
        (tmp_path / name).mkdir()
    (tmp_path / "dvc.lock").touch()
    assert_judged(doctor.work_tree, {"root": tmp_path}, ("ok", str(tmp_path)))
    monkeypatch.setattr(os, "access", lambda path, _: Path(path).name not in ("dvc.lock", "models"))
    assert_judged(doctor.work_tree, {"root": tmp_path}, ("problem", "models, dvc.lock"))


def test_a_work_tree_in_the_containers_own_layer(play: Play, tmp_path: Path) -> None:
    play(mounts={"/": "overlay", "/proc": "proc"})
    assert_judged(doctor.work_tree, {"root": tmp_path}, ("warning", "are lost with the container"))
    play(mounts={"/": "overlay", str(tmp_path): "ext4"})
    assert_judged(doctor.work_tree, {"root": tmp_path}, ("ok", str(tmp_path)))


def test_the_file_system_of_a_path() -> None:
    assert doctor.file_system(Path("/proc/self")) == "proc"


@pytest.fixture
def plain_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name, value in {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CEILING_DIRECTORIES": str(tmp_path),
        **{f"GIT_{role}_{what}": "test@example.org" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    }.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "tree").mkdir()
    return tmp_path / "tree"


def git(tree: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(tree), *arguments], check=True, capture_output=True)


def test_git(plain_git: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def assert_git(status: str, subject: str) -> None:
        assert_judged(doctor.git, {"root": plain_git, "git": facts.ask("git")}, (status, subject))

    monkeypatch.chdir(plain_git)
    assert_git("problem", "start from a clone")
    git(plain_git, "init", "--quiet")
    assert_git("warning", "git commit")
    git(plain_git, "commit", "--quiet", "--allow-empty", "--message", "first")
    assert_git("ok", "at commit ")
    with monkeypatch.context() as foreign:
        foreign.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # git's own way to test this
        assert_git("problem", '-> git config --global --add safe.directory "$PWD"')
    (plain_git / ".git" / "HEAD").write_text("ref: refs/heads/nowhere", encoding="utf-8")
    (plain_git / ".git" / "config").write_text("[", encoding="utf-8")
    assert_git("problem", "bad config")
    monkeypatch.setenv("PATH", str(plain_git))
    assert_git("problem", "apt-get install git")


@pytest.fixture
def repository(plain_git: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A DVC repository without a remote."""
    for name in ("GLOBAL_CONFIG_DIR", "SYSTEM_CONFIG_DIR", "SITE_CACHE_DIR"):
        monkeypatch.setenv(f"DVC_{name}", str(plain_git.parent / "private"))
    monkeypatch.setenv("DVC_NO_ANALYTICS", "1")
    git(plain_git, "init", "--quiet")
    (plain_git / ".dvc").mkdir()
    (plain_git / ".dvc" / "config").touch()
    monkeypatch.chdir(plain_git)
    return plain_git


@pytest.mark.parametrize(
    ("config", "cache", "remote"),
    [
        ("", ("ok", ".dvc/cache/files/md5"), "dvc remote add --default storage"),
        ("[cache\n", ("problem", ".dvc/config.local"), "see above"),
        (None, ("problem", "cd to the top of the checkout"), "see above"),  # no repository
    ],
)
def test_what_dvc_says_of_a_repository(
    config: str | None, cache: tuple[str, str], remote: str, repository: Path
) -> None:
    if config is None:
        shutil.rmtree(repository / ".dvc")
    else:
        (repository / ".dvc" / "config").write_text(config, encoding="utf-8")
    answer = {"root": repository, "dvc": facts.ask("dvc")}
    assert_judged(doctor.cache, answer, cache)
    assert_judged(doctor.remote, answer, ("not applicable", remote))


def test_a_cache_that_cannot_be_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert_judged(doctor.cache, {"dvc": DVC}, ("problem", "sudo chown"))


def ask_remote(repository: Path, url: str) -> Answer:
    text = f"[core]\n    remote = storage\n['remote \"storage\"']\n    url = {url}\n"
    (repository / ".dvc" / "config").write_text(text, encoding="utf-8")
    return facts.ask("dvc")


@pytest.mark.parametrize(
    ("url", "status", "subject"),
    [
        ("/nowhere/there", "ok", "its folder is missing"),
        ("/", "ok", "storage (/) answers -> "),
        ("webhdfs://namenode.example/path", "problem", "'dvc-webhdfs' to be installed -> install the named package"),
    ],
)
def test_a_remote(url: str, status: str, subject: str, repository: Path) -> None:
    assert_judged(doctor.remote, {"dvc": ask_remote(repository, url)}, (status, subject))


@pytest.mark.parametrize(
    ("code", "status", "subject"),
    [(404, "ok", "its folder is missing"), (403, "problem", "403"), (500, "problem", "500")],
)
def test_a_remote_behind_a_server(code: int, status: str, subject: str, repository: Path) -> None:
    """The report leaves out the secrets in the server's address."""
    with serving(lambda _: (code, "")) as url:
        answer = ask_remote(repository, url.replace("://", "://me:secret@") + "/x?sig=secret")
    assert_judged(doctor.remote, {"dvc": answer}, (status, subject))
    assert "secret" not in redacted(str(judged(doctor.remote, dvc=answer)))


@pytest.mark.parametrize(
    ("program", "answer"),
    [
        (
            "sleep 9 & echo words; echo \"{'layers': 3}\"; echo '{\"gpus\": 2}'; exec sleep 300",
            Answer({"gpus": 2}, "no answer within 2 s"),
        ),
        ("echo the reason >&2; exit 3", Answer({}, "the reason")),
        ("exit 3", Answer({}, "the process ended with 3")),
        ('echo "$1 $2" >&2; exit 3', Answer({}, f"-m {facts.__name__}")),  # by which a rehearsal recognises a probe
    ],
)
def test_a_probe_that_hangs_or_crashes(
    program: str, answer: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{program}\n", encoding="utf-8")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert facts.ask("torch", 2) == answer


def test_the_store_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe answers even without params.yaml."""
    monkeypatch.chdir(tmp_path)
    assert facts.ask("store") == Answer(tracking.health(Path(), "training")._asdict())


# probes, and the whole report


def test_the_job_s_own_parts_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for split, name in product(("train", "test"), "ab"):
        (tmp_path / "shots" / split / name).mkdir(parents=True)
        (tmp_path / "shots" / split / name / "1.png").touch()
    net = "lambda classes, hidden, **_: nn.Sequential(nn.Flatten(), nn.Linear(12, hidden), nn.Linear(hidden, classes))"
    (tmp_path / "nets.py").write_text(f"from torch import nn\n\nprint('{{}}')\nnet = {net}\n")

    def parts(hidden: int | str = 4, *, folder: str = "shots", batch_size: int = 2) -> Answer:
        job = {
            "fetch": {"dataset": "image_folder", "image_folder": folder},
            "prepare": {"image_size": [2, 2]},
            "train": {"model": "nets:net", "model_options": {"hidden": hidden}, "batch_size": batch_size},
            "variants": {"baseline": {}},
        }
        (tmp_path / "params.yaml").write_text(json.dumps(job))
        return facts.ask("parts")

    known, raising = parts(), parts("many")
    assert known.found["parameters"] == 12 * 4 + 4 + 4 * 2 + 2, known
    assert "2 training samples" in known.found["data"]
    assert judged(doctor.parts, parts=known)[0][0] == "ok"
    assert "nets:net raised TypeError: " in raising.failure
    assert "nets.py, line 4, in <lambda>" in raising.failure
    ((status, said),) = judged(doctor.parts, parts=raising)
    assert status == "problem"
    assert said.endswith("-> correct params.yaml, or your module that the message names")
    assert "has no directory 'train'; expected" in parts(folder="shots/train").failure
    assert "train.batch_size: found 3, but " in parts(batch_size=3).failure
    shutil.rmtree(tmp_path / "shots/test")
    for name in ("2.png", "3.png", "4.png", "5.png"):
        (tmp_path / "shots/train/a" / name).touch()
    assert "5 training samples" in parts().found["data"], "one of the five images of class a is held out for testing"


def test_torch_is_asked_in_a_process_of_its_own() -> None:
    import torch

    answer = facts.ask("torch")
    assert bool(answer.failure) is bool(torch.version.cuda and not torch.cuda.is_available())
    assert answer.found["version"] == torch.__version__
    assert answer.found["cuda"] == torch.version.cuda
    if torch.version.cuda:
        assert answer.found["gpus"] == torch.cuda.device_count()


FAKE_TORCH = """
class version: cuda = '13.2'
class cuda:
    device_count = lambda: 1
    get_device_name = lambda index: 'H100'
    def init(): {}
def ones(count, device): raise RuntimeError('no\\n kernel')
__version__ = '2.15.0'
"""


@pytest.mark.parametrize(
    ("module", "found", "failure"),
    [
        ("raise ImportError('libcudart.so.13: cannot open')", set(), "ImportError: libcudart.so.13: cannot open"),
        (
            FAKE_TORCH.format("raise RuntimeError('too\\nold')"),
            {"version", "cuda", "gpus"},
            "RuntimeError: too old",
        ),
        (FAKE_TORCH.format("pass"), {"version", "cuda", "gpus"}, "RuntimeError: no kernel"),
    ],
)
def test_a_torch_that_fails_says_why(
    module: str, found: set[str], failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text(module, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    answer = facts.ask("torch")
    assert (set(answer.found), answer.failure) == (found, failure)


def test_where_everything_is_broken_each_thing_is_a_line(tmp_path: Path) -> None:
    """Without params.yaml, torch, NVML, git and a DVC repository, and with a server that is down, doctor prints a
    report, not a traceback."""
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("torch", "pynvml", "dvc"):
        (broken / f"{name}.py").write_text("raise ImportError('broken')", encoding="utf-8")
    empty = tmp_path / "empty"
    empty.mkdir()
    started = [sys.executable, "-c", "import sys; from pipeline import cli; sys.exit(cli.main(['doctor', '--json']))"]
    (broken / "sitecustomize.py").write_text(f"import sys; sys.path.insert(0, {str(broken)!r})", encoding="utf-8")
    done = subprocess.run(
        started,
        cwd=empty,
        env=os.environ
        | {
            "PYTHONPATH": f"{broken}{os.pathsep}{ROOT}",
            "PATH": str(empty),
            "MLFLOW_TRACKING_URI": "http://127.0.0.1:1",
        },
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (1, "")
    report = json.loads(done.stdout)
    checks = {each["check"]: each for each in report["checks"]}
    for name in ("params.yaml", "torch", "NVIDIA driver", "git", "DVC cache", "tracking"):
        assert checks[name]["status"] == "problem", name
        assert checks[name]["remedy"]
    assert not [each for each in report["checks"] if "could not be checked" in each["found"]]
    assert report["problems"] == sum(each["status"] == "problem" for each in report["checks"])


def test_a_failure_that_nobody_foresaw_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Facts) -> Finding:
        raise ZeroDivisionError("a bug of token@host, at https://token@host")

    monkeypatch.setitem(doctor.CHECKS, "memory", fails)
    found = {finding.check: finding for finding in doctor.examine(known())}
    assert found["memory"].status == "warning"
    assert "ZeroDivisionError: a bug" in found["memory"].found
    assert "://***@host" in found["memory"].found
    assert found["disk"].status in ("ok", "warning"), "the other checks still run"


def test_a_machine_that_cannot_be_looked_at_is_planned_for_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> Machine:
        raise OSError("broken")

    (tmp_path / "params.yaml").write_text("variants: {baseline: {}}", encoding="utf-8")
    monkeypatch.setattr(environment, "machine", fails)
    monkeypatch.setattr(facts, "ask", lambda _: Answer({}))
    found = facts.look(tmp_path)
    assert (found.planned_gpus, found.job.plans) == (0, {})
    assert found.job.config is not None


def report(monkeypatch: pytest.MonkeyPatch, finding: Finding) -> None:
    """Make ``finding`` the only finding of doctor, by the check "disk"."""
    monkeypatch.setattr(doctor, "look", lambda _: known())
    monkeypatch.setattr(doctor, "CHECKS", {"disk": lambda _: finding})


@pytest.mark.parametrize("arguments", [["doctor"], ["doctor", "--json"]])
def test_no_address_is_shown_with_its_secrets(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = Finding("problem", "no answer from https://t0ken@host/x?key=t0ken", "set it to ssh://t0ken:x@host")
    report(monkeypatch, finding)
    assert cli.main(arguments) == 1
    said = capsys.readouterr().out
    assert "https://***@host/x?***" in said
    assert "t0ken" not in said


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warning", 0), ("not applicable", 0), ("problem", 1)])
def test_only_a_problem_fails(
    status: Any, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report(monkeypatch, Finding(status, "it is so", "do this"))
    assert cli.main(["doctor"]) == code
    out = capsys.readouterr().out
    assert "disk  it is so\n" in out
    assert "-> do this\n" in out
    assert cli.main(["doctor", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["checks"] == [
        {"check": "disk", "status": status, "found": "it is so", "remedy": "do this"}
    ]


def test_lines_fit_the_terminal_and_keep_commands_whole() -> None:
    command = "git config --global --add safe.directory /a/very/long/path/" + "x" * 90
    said = [Finding("problem", "word " * 60, command, "git"), Finding("ok", "fine", check="shared memory")]
    written = findings.as_text(said, 80).splitlines()
    assert max(len(line) for line in written if "x" * 90 not in line) <= 80
    assert any(line.endswith("/a/very/long/path/" + "x" * 90) for line in written)
    assert [line.index("fine") for line in written if "fine" in line] == [written[0].index("word")], "aligned"
    assert written[-1] == "1 problem, 0 warnings"
