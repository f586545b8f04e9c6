"""Each check, brought into the situation that it is there for: what it says, and what it tells a person to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest

from pipeline import cli, environment, tracking
from pipeline.errors import ConfigError
from pipeline.params import Machine, parse
from pipeline.plans import plans
from pipeline.tools import doctor
from pipeline.tools.doctor import checkout, gpus, params, printed, probes, resources
from pipeline.tools.doctor.findings import Finding
from pipeline.tools.doctor.gpus import Driver, Gpu
from pipeline.tools.doctor.params import Job
from pipeline.tools.doctor.probes import Answer

ROOT = Path(__file__).parent.parent
LAPTOP = Machine(gpus=0, gpu_native_bf16=False, cpu_native_bf16=True)
TWO = Machine(gpus=2, gpu_native_bf16=True, cpu_native_bf16=False)

A, B = Gpu("GPU-a", "H100", None, []), Gpu("GPU-b", "H100", None, [])
DRIVER = Driver("580.65.06", (13, 0), (A, B))
NO_DRIVER = Driver(failure="missing")
TORCH = Answer({"version": "2.15.0+cu132", "cuda": "13.2", "nccl": "2.30.7", "gpus": 2, "errors": []})
CPU_TORCH = Answer({"version": "2.15.0+cpu", "cuda": None, "nccl": None})


def job(machine: Machine = LAPTOP, **train: Any) -> Job:
    config = parse({"train": train, "variants": {"baseline": {}, "ddp": {"parallelism": "ddp"}}})
    try:
        return Job(config, plans=plans(config, machine))
    except ConfigError:
        return Job(config)


def only(found: Iterator[Finding]) -> Finding:
    (finding,) = found
    return finding


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This machine's own settings and hardware are not what the tests are about."""
    for name in ("CUDA_VISIBLE_DEVICES", "MLFLOW_TRACKING_URI", "NO_COLOR", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    for name in ("USERNAME", "PASSWORD", "TOKEN"):
        monkeypatch.delenv(f"MLFLOW_TRACKING_{name}", raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gpus, "PCI", tmp_path / "no-pci")
    monkeypatch.setattr(gpus, "KERNEL_DRIVER", tmp_path / "no-driver")


# params.yaml


def test_params_that_can_be_read_and_run(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("variants: {baseline: {}, ddp: {parallelism: ddp}}", encoding="utf-8")
    first, second = params.check(params.read(tmp_path / "params.yaml", TWO))
    assert first == ("params.yaml", "ok", "2 variants: baseline, ddp", "")
    assert second == ("variants", "ok", "all run here as asked: baseline on 1 GPU(s), ddp on 2 GPU(s)", "")


@pytest.mark.parametrize(
    ("text", "found", "remedy"),
    [
        (None, "params.yaml is missing", "cd to the top of the checkout"),
        ("variants: [", "is not YAML", "correct params.yaml"),
        ("{variants: {a: {}}, trian: {}}", "trian: unknown key", "correct params.yaml"),
    ],
)
def test_params_that_cannot_be_read(text: str | None, found: str, remedy: str, tmp_path: Path) -> None:
    if text:
        (tmp_path / "params.yaml").write_text(text, encoding="utf-8")
    finding = only(params.check(params.read(tmp_path / "params.yaml", LAPTOP)))
    assert finding.status == "problem"
    assert found in finding.found
    assert finding.remedy.startswith(remedy)


def test_variants_that_cannot_run_here_and_what_is_left_out(tmp_path: Path) -> None:
    text = "variants: {baseline: {}, half: {precision: fp16}, brain: {precision: bf16}}"
    (tmp_path / "params.yaml").write_text(text, encoding="utf-8")
    plain = Machine(gpus=0, gpu_native_bf16=False, cpu_native_bf16=False)
    _, refused, left_out = params.check(params.read(tmp_path / "params.yaml", plain))
    assert refused.status == "problem"
    assert refused.found.startswith("cannot run here: half: variants.half.precision: found 'fp16', but it needs a GPU")
    assert left_out.status == "warning"
    assert left_out.found.startswith("brain: bf16 is left out: this CPU has no native bf16")
    assert left_out.remedy.endswith("set train.without_native: run")


def test_a_batch_that_some_gpus_do_not_divide(tmp_path: Path) -> None:
    text = "{train: {batch_size: 256}, variants: {baseline: {}, ddp: {parallelism: ddp}}}"
    (tmp_path / "params.yaml").write_text(text, encoding="utf-8")
    three = Machine(gpus=3, gpu_native_bf16=True, cpu_native_bf16=False)
    _, left_out = params.check(params.read(tmp_path / "params.yaml", three))
    assert left_out.found.startswith("ddp: 1 of 3 GPUs is left out")
    assert left_out.remedy == "set train.batch_size to a multiple of the number of GPUs"


def test_names_that_are_there() -> None:
    finding = only(params.check_names(job(model="resnet18"), TORCH, Answer({"error": None})))
    assert finding == ("model", "ok", "resnet18, with cross_entropy and accuracy", "")


def test_names_that_stand_for_nothing() -> None:
    for answer in (Answer({"error": "train.model: found 'x'"}), Answer({}, "NameError: train.model: found 'x'")):
        finding = only(params.check_names(job(), TORCH, answer))
        assert (finding.check, finding.status) == ("model", "problem")
        assert "train.model: found 'x'" in finding.found
        assert finding.remedy == "correct params.yaml, or the module that it names"
    slow = only(params.check_names(job(), TORCH, Answer({}, "no answer within 30 s", late=True)))
    assert slow.status == "warning", "they may be there"
    assert slow.remedy.startswith("try again")
    assert not list(params.check_names(job(), Answer({}, "no torch"), Answer({}, "no torch"))), "one line says so"
    assert not list(params.check_names(Job(mistakes="not YAML"), TORCH, Answer({}, "not YAML")))


@pytest.mark.parametrize(
    ("train", "error"),
    [
        ({"model": "my_nets:net", "loss": "my_nets:net", "metric": "my_nets:net"}, None),
        pytest.param({"model": "resnet18"}, None, marks=pytest.mark.slow),
        ({"model": "resnet81"}, "train.model: found 'resnet81'; did you mean resnet18"),
        pytest.param({"model": "my_nets:nets"}, "my_nets.py has no 'nets'. Did you mean net?", marks=pytest.mark.slow),
        pytest.param(
            {"metric": "scores:top"},
            "train.metric: found 'scores:top', but there is no module 'scores'",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_names_are_looked_up(
    train: dict[str, str], error: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = json.dumps({"train": train, "variants": {"baseline": {}}})
    (tmp_path / "params.yaml").write_text(written, encoding="utf-8")
    (tmp_path / "my_nets.py").write_text("def net(): ...\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    answer = probes.ask("names", 120)
    assert answer.failure == ""
    assert answer.found["error"] is None if error is None else error in answer.found["error"]


# torch, driver, GPUs, NCCL


def test_torch_that_works() -> None:
    assert gpus.check_torch(job(), TORCH, NO_DRIVER) == ("torch", "ok", "2.15.0+cu132, for CUDA 13.2", "")
    assert gpus.check_torch(job(), CPU_TORCH, NO_DRIVER) == ("torch", "ok", "2.15.0+cpu, for CPUs", "")


def test_torch_that_does_not_import() -> None:
    missing = Answer({}, "ModuleNotFoundError: No module named 'torch'")
    finding = gpus.check_torch(job(), missing, NO_DRIVER)
    assert finding.status == "problem"
    assert finding.found == "cannot be imported: ModuleNotFoundError: No module named 'torch'"
    assert finding.remedy.startswith("make repro")
    slow = gpus.check_torch(job(), Answer({}, "no answer within 30 s", late=True), NO_DRIVER)
    assert slow.status == "warning", "it may be there"
    assert slow.remedy.startswith("try again")


@pytest.mark.parametrize(("device", "status"), [("auto", "warning"), ("cuda", "problem"), ("cpu", "ok")])
def test_a_torch_for_cpus_beside_gpus(device: str, status: str) -> None:
    finding = gpus.check_torch(job(device=device), CPU_TORCH, DRIVER)
    assert finding.status == status
    if status != "ok":
        assert finding.found == "2.15.0+cpu is a CPU build, but there are 2 GPU(s)"
        assert finding.remedy == "install a CUDA build of torch, or set train.device: cpu"


def driver(asked: Job, driver: Driver, torch: Answer | None = None, *, container: bool = False) -> Finding:
    torch = torch or (torch_with(gpus=0) if driver.failure else TORCH)
    return gpus.check_driver(asked, torch, driver, container=container)


def put_a_gpu_on_the_bus(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    for name, vendor, kind in (("0000:01:00.0", "0x10de", "0x030200"), ("0000:01:00.1", "0x10de", "0x040300")):
        (path / "pci" / name).mkdir(parents=True)
        (path / "pci" / name / "vendor").write_text(vendor + "\n", encoding="ascii")
        (path / "pci" / name / "class").write_text(kind + "\n", encoding="ascii")
    monkeypatch.setattr(gpus, "PCI", path / "pci")


def load_the_kernel_driver(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    (path / "version").write_text("NVRM version: ...", encoding="ascii")
    monkeypatch.setattr(gpus, "KERNEL_DRIVER", path / "version")


def test_a_machine_without_gpus() -> None:
    finding = driver(job(), NO_DRIVER)
    assert (finding.status, finding.found) == ("not applicable", "no NVIDIA GPU here: the job runs on the CPU")
    assert driver(job(device="cpu"), NO_DRIVER).status == "not applicable"
    demanded = driver(job(device="cuda"), NO_DRIVER)
    assert (demanded.status, demanded.found) == ("problem", "train.device is cuda, but there is no NVIDIA GPU")
    assert demanded.remedy == "use a machine with a GPU, or set train.device: auto"
    assert "--gpus all" in driver(job(device="cuda"), NO_DRIVER, container=True).remedy


def test_a_gpu_without_a_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put_a_gpu_on_the_bus(monkeypatch, tmp_path)
    finding = driver(job(), NO_DRIVER)
    assert (finding.status, finding.found) == ("problem", "missing, but this machine has 1 NVIDIA GPU(s)")
    assert finding.remedy == "install the NVIDIA driver, 580 or newer; or set train.device: cpu"


@pytest.mark.parametrize("sign", [put_a_gpu_on_the_bus, load_the_kernel_driver])
def test_a_container_started_without_its_gpus(
    sign: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sign(monkeypatch, tmp_path)
    finding = driver(job(), NO_DRIVER, container=True)
    assert finding.status == "problem"
    assert finding.found == "the host has an NVIDIA GPU, but this container was started without it"
    assert finding.remedy.startswith("docker run --gpus all ... (the host needs the NVIDIA Container Toolkit)")


def test_a_driver_without_its_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    load_the_kernel_driver(monkeypatch, tmp_path)
    finding = driver(job(), NO_DRIVER)
    assert finding.status == "problem"
    assert "libnvidia-ml.so.1 is missing" in finding.found


@pytest.mark.parametrize(
    ("failure", "said"), [("missing", "its library NVML is missing"), ("Unknown Error", "Unknown")]
)
def test_cuda_computes_though_its_driver_tells_nothing(failure: str, said: str) -> None:
    """As in a container without the capability utility."""
    finding = driver(job(TWO), Driver(failure=failure), TORCH, container=True)
    assert finding.status == "warning"
    assert said in finding.found
    assert "CUDA computes, but nobody sees heat" in finding.found
    assert finding.remedy.endswith("--env NVIDIA_DRIVER_CAPABILITIES=compute,utility")
    assert look(job(TWO), TORCH, Driver(failure=failure), 2)[1:3] == (
        "ok",
        "torch computes on 2, and the plans count on 2",
    )
    assert look(job(), TORCH, Driver(failure=failure), 0).status == "problem"


def test_a_gpu_that_could_not_be_used_is_said() -> None:
    broken = LAPTOP.model_copy(update={"why_no_gpu": "CUDA's error 802"})
    found = list(params.check(job(broken)))
    assert (
        "baseline: GPU is left out: CUDA's error 802",
        "see to the NVIDIA driver, below, or set train.device: cpu",
    ) in [(each.found, each.remedy) for each in found]


@pytest.mark.parametrize(
    ("failure", "container", "remedy"),
    [
        ("Driver/library version mismatch", False, "reboot the host"),
        ("nvidia-ml-py cannot be imported (broken)", False, "make repro"),
        ("Unknown Error", True, "start the container anew with --gpus all"),
        ("Unknown Error", False, "run nvidia-smi, and read"),
    ],
)
def test_a_driver_that_does_not_answer(failure: str, container: bool, remedy: str) -> None:
    finding = driver(job(), Driver(failure=failure), container=container)
    assert (finding.status, finding.found) == ("problem", f"does not answer: {failure}")
    assert finding.remedy.startswith(remedy)


def test_how_new_the_driver_must_be() -> None:
    assert driver(job(TWO), DRIVER) == ("NVIDIA driver", "ok", "580.65.06, for CUDA up to 13.0", "")
    old = Driver("535.54.03", (12, 2), (A,))
    broken = Answer({**TORCH.found, "gpus": 0, "errors": ["RuntimeError: The NVIDIA driver on your system is too old"]})
    finding = driver(job(TWO), old, broken)
    assert finding.status == "problem"
    assert finding.found == (
        "535.54.03, for CUDA up to 12.2; too old for torch 2.15.0+cu132, which is built for CUDA 13.2"
    )
    assert finding.remedy == "install driver 580 or newer on the host, or a torch that is built for CUDA 12"
    assert driver(job(TWO), old, TORCH).status == "ok", "with the compatibility package, torch computes"


def test_the_driver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(*_: object) -> None:
        raise pynvml.NVMLError_NotFound

    def mode(gpu: str) -> list[int]:
        if gpu == "plain":
            raise pynvml.NVMLError_NotSupported
        return [1, 1]

    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.65.06",
        "nvmlSystemGetCudaDriverVersion_v2": lambda: 13020,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: ["plain", "split"][index],
        "nvmlDeviceGetUUID": lambda handle: f"UUID-{handle}",
        "nvmlDeviceGetName": lambda handle: f"the {handle} one",
        "nvmlDeviceGetComputeRunningProcesses": lambda gpu: [SimpleNamespace(pid=7)] if gpu == "plain" else [],
        "nvmlDeviceGetMigMode": mode,
        "nvmlDeviceGetMaxMigDeviceCount": lambda _: 2,
        "nvmlDeviceGetMigDeviceHandleByIndex": lambda _, index: "first" if index == 0 else not_found(),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    assert gpus.ask_driver() == Driver(
        "580.65.06",
        (13, 2),
        (Gpu("UUID-plain", "the plain one", None, [7]), Gpu("UUID-split", "the split one", ["UUID-first"], [])),
    )

    def fails(error: type[pynvml.NVMLError]) -> Callable[[], None]:
        def init() -> None:
            raise error

        return init

    monkeypatch.setattr(pynvml, "nvmlInit", fails(pynvml.NVMLError_LibraryNotFound))
    assert gpus.ask_driver() == NO_DRIVER
    monkeypatch.setattr(pynvml, "nvmlInit", fails(pynvml.NVMLError_LibRmVersionMismatch))
    assert "mismatch" in gpus.ask_driver().failure


def look(asked: Job, torch: Answer, driver: Driver, planned: int) -> Finding:
    return only(gpus.check_gpus(asked, torch, driver, planned))


def torch_with(**found: Any) -> Answer:
    return Answer({**TORCH.found, **found})


def test_gpus_that_work(monkeypatch: pytest.MonkeyPatch) -> None:
    assert look(job(TWO), TORCH, DRIVER, 2) == ("GPUs", "ok", "torch computes on 2 x H100", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    shown = look(job(TWO), torch_with(gpus=1), DRIVER, 1)
    assert (shown.status, shown.found) == ("ok", "torch computes on 1 x H100 (1 of 2: CUDA_VISIBLE_DEVICES=1)")


@pytest.mark.parametrize(
    ("value", "device", "status"),
    [("", "auto", "warning"), ("-1", "auto", "warning"), ("7", "auto", "problem"), ("", "cuda", "problem")],
)
def test_hidden_gpus(value: str, device: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    finding = look(job(device=device), torch_with(gpus=0), DRIVER, 0)
    assert finding == ("GPUs", status, f"CUDA_VISIBLE_DEVICES={value!r} hides all 2", "unset CUDA_VISIBLE_DEVICES")


def test_gpus_that_torch_cannot_use() -> None:
    none = torch_with(gpus=0, errors=["RuntimeError: CUDA unknown error"])
    finding = look(job(TWO), none, DRIVER, 2)
    assert finding.status == "problem"
    assert finding.found == (
        "the driver shows 2, of which 2 should be visible; torch sees 0: RuntimeError: CUDA unknown error"
    )
    old = torch_with(errors=["RuntimeError: CUDA error: no kernel image is available for execution on the device"])
    assert look(job(TWO), old, DRIVER, 2).remedy.startswith("install a torch that is built for this GPU's compute cap")
    hanging = Answer({"version": "2.15.0", "cuda": "13.2"}, "no answer within 30 s")
    stuck = look(job(TWO), hanging, DRIVER, 2)
    assert stuck.found == "torch does not come back from using them: no answer within 30 s"
    assert look(job(), TORCH, Driver("580", (13, 0)), 0).found == "the driver shows none"


@pytest.mark.parametrize(
    ("device", "torch", "driver"),
    [
        ("cpu", TORCH, DRIVER),
        ("auto", Answer({**TORCH.found, "gpus": 0}), NO_DRIVER),
        ("auto", CPU_TORCH, DRIVER),
        ("auto", Answer({}), DRIVER),
    ],
)
def test_gpus_that_nobody_could_use(device: str, torch: Answer, driver: Driver) -> None:
    assert look(job(device=device), torch, driver, 0).status == "not applicable"


def test_split_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    split = Driver("580", (13, 0), (A, Gpu("GPU-c", "A100", ["MIG-1", "MIG-2"], [])))
    warning, ok = gpus.check_gpus(job(), torch_with(gpus=1), split, 1)
    assert warning.status == "warning"
    assert warning.found.startswith("GPU 1 is split (MIG): CUDA shows a process one instance, never more")
    assert warning.remedy.startswith("export CUDA_VISIBLE_DEVICES=MIG-1")
    assert ok.status == "ok"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-2")
    chosen = look(job(), torch_with(gpus=1), split, 1)
    assert (chosen.status, chosen.found) == ("ok", "torch computes on 1 x A100 (1 of 2: CUDA_VISIBLE_DEVICES=MIG-2)")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    empty = look(job(), torch_with(gpus=0), Driver("580", (13, 0), (Gpu("GPU-c", "A100", [], []),)), 0)
    assert (empty.status, empty.found) == (
        "problem",
        "GPU 0 is split (MIG) but has no instance, so CUDA cannot use it",
    )
    assert empty.remedy.startswith("nvidia-smi -i 0 -mig 0")


def test_others_on_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Driver("580", (13, 0), (A, Gpu("GPU-b", "H100", None, [41, 42])))
    _, foreign = gpus.check_gpus(job(TWO), TORCH, busy, 2)
    assert (foreign.check, foreign.status) == ("GPU processes", "warning")
    assert foreign.found.startswith("2 other process(es) compute on GPU 1 (pid 41, 42)")
    assert "nvidia-smi" in foreign.remedy
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert look(job(TWO), torch_with(gpus=1), busy, 1).status == "ok", "a hidden GPU's processes harm nobody"


def test_nccl() -> None:
    assert gpus.check_nccl(job(TWO), TORCH) == ("NCCL", "ok", "2.30.7 in torch, between 2 GPUs", "")
    without = gpus.check_nccl(job(TWO), torch_with(nccl=None))
    assert (without.status, without.found) == ("problem", "torch has none, and 2 GPUs should train together")
    assert "for Linux" in without.remedy
    on_cpu = gpus.check_nccl(job(), TORCH)
    assert (on_cpu.status, on_cpu.found) == ("not applicable", "2.30.7 in torch; no GPU; ddp runs over gloo")


# CPU, memory, shared memory, disk


def test_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(environment, "cores", lambda: 1.5)
    finding = resources.check_cpu(job())
    assert finding.status == "warning"
    assert finding.found == "1.5 of 64 cores for 2 processes that train together: they wait for each other"
    assert "--cpus 2" in finding.remedy
    monkeypatch.setattr(environment, "cores", lambda: 2)
    assert resources.check_cpu(job()) == ("CPU", "ok", "2 of 64 cores", "")


def limit_memory(monkeypatch: pytest.MonkeyPatch, path: Path, membership: str, files: dict[str, str]) -> None:
    (path / "membership").write_text(membership, encoding="utf-8")
    for name, content in files.items():
        (path / "mount" / name).parent.mkdir(parents=True, exist_ok=True)
        (path / "mount" / name).write_text(content, encoding="utf-8")
    monkeypatch.setattr(environment.cpus, "CGROUP_MEMBERSHIP", path / "membership")
    monkeypatch.setattr(environment.cpus, "CGROUP_MOUNT", path / "mount")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * 2**30))


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        ("0::/\n", {"memory.max": "max\n"}, None),
        ("0::/pod/box\n", {"pod/memory.max": f"{3 * 2**30}\n", "pod/box/memory.max": "max\n"}, 3 * 2**30),
        ("4:memory:/box\n3:cpu:/other\n", {"memory/box/memory.limit_in_bytes": "1048576\n"}, 2**20),
    ],
)
def test_the_memory_limit_of_control_groups(
    membership: str, files: dict[str, str], limit: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limit_memory(monkeypatch, tmp_path, membership, files)
    assert resources.memory_limit() == limit


def test_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limit_memory(monkeypatch, tmp_path, "0::/\n", {"memory.max": f"{3 * 2**30}"})
    finding = resources.check_memory(job())
    assert finding.status == "warning"
    assert finding.found == "3.0 GiB is the container's limit; 2 training processes may need 4.0 GiB"
    assert finding.remedy == "docker run --memory 4g, or lower processes in params.yaml"
    limit_memory(monkeypatch, tmp_path, "0::/\n", {"memory.max": f"{100 * 2**30}"})
    assert resources.check_memory(job()) == ("memory", "ok", "64.0 GiB free", "")


def shared(monkeypatch: pytest.MonkeyPatch, path: Path, asked: Job, mebibytes: int, free: int | None = None) -> Finding:
    blocks = SimpleNamespace(f_frsize=2**20, f_blocks=mebibytes, f_bavail=mebibytes if free is None else free)
    with monkeypatch.context() as faked:
        faked.setattr(os, "statvfs", lambda _: blocks)
        return resources.check_shared_memory(asked, path)


def test_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    docker = shared(monkeypatch, tmp_path, job(TWO), 64)
    assert docker.status == "problem"
    assert docker.found == f"{tmp_path}: 64 MiB of 64 MiB free; NCCL between 2 GPUs wants 1.0 GiB"
    assert docker.remedy.startswith("docker run --ipc=host, or --shm-size=1g")
    assert shared(monkeypatch, tmp_path, job(), 64).status == "warning", "nothing of this job needs more"
    assert shared(monkeypatch, tmp_path, job(TWO), 1024).status == "ok"
    littered = shared(monkeypatch, tmp_path, job(TWO), 1024, 10)
    assert littered.status == "problem"
    assert f"rm {tmp_path}/nccl-*" in littered.remedy
    missing = resources.check_shared_memory(job(), tmp_path / "none")
    assert (missing.status, missing.found.split(":")[0]) == ("problem", f"{tmp_path / 'none'} is missing")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "cannot be written to" in shared(monkeypatch, tmp_path, job(), 1024).found


@pytest.mark.parametrize(("free", "status"), [(0.2, "problem"), (3.0, "warning"), (40.0, "ok")])
def test_disk(free: float, status: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()

    def usage(path: Path) -> SimpleNamespace:
        return SimpleNamespace(free=int((free if path == small else 100) * 2**30))

    monkeypatch.setattr(shutil, "disk_usage", usage)
    finding = resources.check_disk([tmp_path, small / "not" / "there"])
    assert finding.status == status
    assert f"free for {small / 'not' / 'there'}" in finding.found
    assert ("dvc gc --workspace" in finding.remedy) is (status != "ok")


# the checkout


def test_a_work_tree_that_cannot_be_written_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("models", "data"):
        (tmp_path / name).mkdir()
    (tmp_path / "dvc.lock").touch()
    assert checkout.check_work_tree(tmp_path, container=False).status == "ok"

    writable = checkout._writable
    monkeypatch.setattr(checkout, "_writable", lambda path: path.name != "models" and writable(path))
    monkeypatch.setattr(os, "access", lambda path, _: Path(path).name != "dvc.lock")
    finding = checkout.check_work_tree(tmp_path, container=False)
    assert finding.status == "problem"
    assert finding.found == f"user {os.getuid()} cannot write to models, dvc.lock in {tmp_path}"
    assert finding.remedy.startswith('sudo chown -R "$(id -u):$(id -g)" .')


def test_a_directory_that_refuses_files() -> None:
    assert not checkout._writable(Path("/proc"))


def test_a_work_tree_in_the_containers_own_layer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    monkeypatch.setattr(checkout, "MOUNTS", mounts)
    mounts.write_text("1 0 0:1 / / rw - overlay overlay rw\n2 1 0:2 / /proc rw - proc proc rw\n", encoding="utf-8")
    finding = checkout.check_work_tree(tmp_path, container=True)
    assert finding.status == "warning"
    assert "is lost with the container" in finding.found
    assert finding.remedy.startswith(f'docker run -v "$PWD:{tmp_path}"')
    with mounts.open("a", encoding="utf-8") as file:
        file.write(f"3 1 8:1 /src {tmp_path} rw shared:1 - ext4 /dev/sda rw\n")
    assert checkout.file_system(tmp_path / "x") == "ext4"
    assert checkout.check_work_tree(tmp_path, container=True).status == "ok"


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
    tree = plain_git
    outside = checkout.check_git(tree)
    assert (outside.status, outside.found) == ("problem", f"{tree} is no git repository; DVC and gate need one")
    git(tree, "init", "--quiet")
    unborn = checkout.check_git(tree)
    assert (unborn.status, unborn.found, unborn.remedy) == (
        "warning",
        "no commit yet; results name the commit that made them",
        "git commit",
    )
    git(tree, "commit", "--quiet", "--allow-empty", "--message", "first")
    assert checkout.check_git(tree).found.startswith("at commit ")

    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # git's own way to test this
    foreign = checkout.check_git(tree)
    assert foreign.status == "problem"
    assert foreign.found == f"refuses {tree}: it belongs to another user (dubious ownership)"
    assert foreign.remedy == f"git config --global --add safe.directory {tree}"

    monkeypatch.setenv("PATH", str(tree))
    assert checkout.check_git(tree).remedy == "apt-get install git"


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


def with_remote(repository: Path, url: str, *lines: str) -> Finding:
    settings = "\n    ".join([f"url = {url}", *lines])
    text = f"[core]\n    remote = storage\n['remote \"storage\"']\n    {settings}\n"
    (repository / ".dvc" / "config").write_text(text, encoding="utf-8")
    return only(checkout.check_remote(probes.ask("dvc", 60)))


def test_what_dvc_says_of_a_repository(repository: Path) -> None:
    (repository / ".dvc" / "cache" / "files" / "md5").mkdir(parents=True)
    answer = probes.ask("dvc", 60)
    cache = checkout.check_cache(repository, answer)
    assert (cache.status, cache.remedy) == ("ok", "")
    assert cache.found.startswith(".dvc/cache/files/md5, on the file system of the work tree")
    remote = only(checkout.check_remote(answer))
    assert remote.status == "not applicable"
    assert remote.remedy.startswith("dvc remote add --default storage")


def test_no_dvc_repository(plain_git: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(plain_git, "init", "--quiet")
    monkeypatch.chdir(plain_git)
    answer = probes.ask("dvc", 60)
    finding = checkout.check_cache(plain_git, answer)
    assert (finding.status, finding.found) == ("problem", "this is no DVC repository")
    assert finding.remedy.startswith("cd to the top of the checkout")
    assert only(checkout.check_remote(answer)).status == "not applicable"


def test_settings_that_dvc_cannot_read(repository: Path) -> None:
    (repository / ".dvc" / "config").write_text("[cache\n", encoding="utf-8")
    finding = checkout.check_cache(repository, probes.ask("dvc", 60))
    assert finding.status == "problem"
    assert finding.found.startswith("DVC cannot read its settings: ")
    late = checkout.check_cache(repository, Answer({}, "no answer within 30 s", late=True))
    assert (late.status, late.found) == ("warning", "DVC is still being imported: no answer within 30 s")


def test_a_cache_elsewhere(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Answer({"cache": "/proc/cache/files/md5", "types": ["reflink", "copy"]})
    monkeypatch.setattr(os, "access", lambda *_: True)
    finding = checkout.check_cache(repository, answer)
    assert finding.status == "warning"
    assert finding.found.startswith("/proc/cache/files/md5 (proc) is on another file system than the work tree (")
    assert finding.remedy.startswith("mount the checkout with its .dvc/cache as one volume")
    monkeypatch.setattr(os, "access", lambda *_: False)
    closed = checkout.check_cache(repository, answer)
    assert (closed.status, closed.found) == ("problem", f"user {os.getuid()} cannot write to /proc")


def test_links_of_the_cache(repository: Path) -> None:
    facts: dict[str, Any] = {"cache": str(repository / ".dvc" / "cache"), "types": ["reflink", "copy"]}
    linked = checkout.check_cache(repository, Answer({**facts, "links": ["reflink", "symlink"]}))
    assert linked.found.endswith("files are reflinks: no copies")
    copied = checkout.check_cache(repository, Answer({**facts, "links": ["symlink"]}))
    assert copied.found.endswith("files are copied: twice the space")
    assert linked.status == copied.status == "ok"


def test_a_remote_in_a_directory(repository: Path, tmp_path: Path) -> None:
    empty = with_remote(repository, str(tmp_path / "shared"))
    assert (empty.status, empty.found) == (
        "ok",
        f"storage ({tmp_path / 'shared'}) answers; nothing is there yet (dvc push makes it)",
    )
    (tmp_path / "shared").mkdir()
    assert with_remote(repository, str(tmp_path / "shared")).found.endswith("answers")
    unwritable = Answer({"remote": "storage", "url": "/mnt", "answers": True, "exists": True, "writable": False})
    assert only(checkout.check_remote(unwritable)).found == "storage (/mnt) cannot be written to"


def test_a_remote_whose_plug_in_is_missing(repository: Path) -> None:
    finding = with_remote(repository, "webhdfs://namenode.example/path")
    assert finding.status == "problem"
    assert finding.found == (
        "storage (webhdfs://namenode.example/path): DVC needs dvc-webhdfs for it, which is not installed"
    )
    assert finding.remedy.startswith("python -m pip install dvc-webhdfs")


def test_a_remote_that_is_not_there(repository: Path, serve: Serve) -> None:
    there = serve(lambda _: (404, ""))
    assert with_remote(repository, there).found.endswith("nothing is there yet (dvc push makes it)")
    refusing = with_remote(repository, serve(lambda _: (403, "")))
    assert refusing.status == "problem"
    assert "403" in refusing.found
    for named in ("me:secret", "secret"):
        secret = with_remote(repository, serve(lambda _: (500, "")).replace("://", f"://{named}@") + "/x?sig=secret")
        assert "secret" not in secret.found
        assert "://***@" in secret.found
    assert "credentials" in refusing.remedy


def test_a_remote_that_hangs(repository: Path, serve: Serve) -> None:
    def hang(_: BaseHTTPRequestHandler) -> tuple[int, str]:
        time.sleep(30)
        return 200, ""

    url = serve(hang)
    (repository / ".dvc" / "config").write_text(
        f"[core]\n    remote = storage\n['remote \"storage\"']\n    url = {url}\n", encoding="utf-8"
    )
    answer = probes.ask("dvc", 60)
    finding = only(checkout.check_remote(answer))
    assert (finding.status, finding.found) == ("problem", f"storage ({url}): no answer within 3 s")
    assert checkout.check_cache(repository, answer).status == "ok", "what was found before stays"


def test_a_probe_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'a library speaks'\necho '{\"gpus\": 2}'\nexec sleep 300\n", encoding="utf-8")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert probes.ask("torch", 2) == ({"gpus": 2}, "no answer within 2 s", True)


def test_a_default_that_is_not_chosen() -> None:
    finding = only(checkout.check_remote(Answer({"remote": None, "remotes": ["storage"]})))
    assert finding.remedy == "dvc remote default storage"


# the tracking server

Reply = Callable[[BaseHTTPRequestHandler], tuple[int, str]]
Serve = Callable[[Reply], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """``serve(reply)``: a server on the loopback that answers every request so; its address."""
    servers: list[ThreadingHTTPServer] = []

    def start(reply: Reply) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, text = reply(self)
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                pass

            def handle(self) -> None:
                with suppress(OSError):  # the client did not wait
                    super().handle()

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


MISSING_EXPERIMENT = '{"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "..."}'


def health(monkeypatch: pytest.MonkeyPatch, uri: str, seconds: float = 20) -> tracking.Health:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return tracking.health(Path(), "training", seconds)


@pytest.mark.parametrize("reply", [(200, '{"experiment": {}}'), (404, MISSING_EXPERIMENT)])
def test_a_server_that_is_well(reply: tuple[int, str], serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = serve(lambda _: reply)
    assert health(monkeypatch, uri) == (True, f"{uri} answers", "")


def test_a_server_whose_files_are_where_this_machine_cannot_write(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = serve(lambda _: (200, '{"experiment": {"artifact_location": "s3://bucket/1"}}'))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "boto3" else object())
    found = health(monkeypatch, uri)
    assert not found.well
    assert found.found.endswith("runs keep their files in s3://bucket/1, for which boto3 is missing")
    assert found.remedy.startswith("python -m pip install boto3")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    assert health(monkeypatch, uri).well


@pytest.mark.parametrize(
    ("reply", "found", "remedy"),
    [
        ((403, "Invalid Host header - possible DNS rebinding attack detected"), "rejects the host name", "add to MLFL"),
        ((401, "who are you"), "wants other credentials (401)", "export MLFLOW_TRACKING_USERNAME"),
        ((500, MISSING_EXPERIMENT), "the server fails (500)", "read the server's log"),
        ((200, "<html>welcome</html>"), "what answers (200) is not MLflow", "set MLFLOW_TRACKING_URI"),
    ],
)
def test_a_server_that_is_not(
    reply: tuple[int, str], found: str, remedy: str, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = serve(lambda _: reply)
    seen = health(monkeypatch, uri)
    assert not seen.well
    assert seen.found.startswith(uri)
    assert found in seen.found
    assert seen.remedy.startswith(remedy)
    if reply[0] == 403:
        name = uri.removeprefix("http://")
        assert seen.remedy.endswith(f": {name},127.0.0.1"), "with and without the port"


def test_a_server_that_hangs_or_is_down(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(_: BaseHTTPRequestHandler) -> tuple[int, str]:
        time.sleep(30)
        return 200, ""

    uri = serve(hang)
    hanging = health(monkeypatch, uri, seconds=0.3)
    assert (hanging.well, hanging.found) == (False, f"{uri}: no answer within 0.3 s")
    assert "unset MLFLOW_TRACKING_URI" in hanging.remedy
    assert "in a container, this name is the container itself" in hanging.remedy
    down = health(monkeypatch, "http://127.0.0.1:1")
    assert down.well is False
    assert "cannot be reached" in down.found


def test_credentials_are_sent_and_not_shown(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def reply(request: BaseHTTPRequestHandler) -> tuple[int, str]:
        seen.append(request.headers["Authorization"])
        return 500, ""

    uri = serve(reply)
    found = health(monkeypatch, uri.replace("://", "://me:secret@"))
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "abc")
    health(monkeypatch, uri)
    assert seen == ["Basic bWU6c2VjcmV0", "Bearer abc"]
    assert "secret" not in f"{found}"
    assert "://***@" in found.found
    assert "secret" not in f"{health(monkeypatch, uri.replace('://', '://secret@') + '?token=secret')}"


def test_the_embedded_store(tmp_path: Path) -> None:
    import sqlite3
    from contextlib import closing

    first = tracking.health(tmp_path, "training", 1)
    assert first.well
    assert first.found == "the embedded store mlflow.db; the first training or publish makes it"
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        database.execute("CREATE TABLE experiments (name, artifact_location)")
        database.execute("INSERT INTO experiments VALUES ('training', '/home/me/checkout/mlartifacts')")
        database.commit()
    moved = tracking.health(tmp_path, "training", 1)
    assert not moved.well
    assert moved.found.endswith("was made in another directory: its artifacts are in /home/me/checkout/mlartifacts")
    assert moved.remedy.startswith("rm -r mlflow.db mlartifacts; python -m pipeline publish")
    (tmp_path / "mlflow.db").write_text("no database", encoding="utf-8")
    assert "cannot be read" in tracking.health(tmp_path, "training", 1).found


def test_a_store_that_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    found = health(monkeypatch, "postgresql://me:secret@db/mlflow")
    assert found.well is None
    assert "secret" not in found.found


# all of it


def test_torch_is_asked_in_a_process_of_its_own() -> None:
    import torch

    answer = probes.ask("torch", 120)
    assert answer.failure == ""
    assert answer.found["version"] == torch.__version__
    assert answer.found["cuda"] == torch.version.cuda
    if torch.version.cuda:
        assert answer.found["nccl"] == ".".join(map(str, torch.cuda.nccl.version()))
        assert answer.found["gpus"] == torch.cuda.device_count()


def test_a_torch_that_cannot_compute_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text(
        "class version: cuda = '13.2'\n"
        "class _C: pass\n"
        "class cuda:\n"
        "    device_count = lambda: 1\n"
        "    def init(): raise RuntimeError('The NVIDIA driver on your system is too old\\n(found version 12020)')\n"
        "__version__ = '2.15.0'\n",
        encoding="utf-8",
    )
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.path.insert(0, {str(tmp_path)!r})", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert probes.ask("torch", 60).found == {
        "version": "2.15.0",
        "cuda": "13.2",
        "nccl": None,
        "gpus": 1,
        "errors": ["RuntimeError: The NVIDIA driver on your system is too old (found version 12020)"],
    }


def test_a_torch_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.path.insert(0, {str(tmp_path)!r})")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    answer = probes.ask("torch", 60)
    assert answer == ({}, "ImportError: libcudart.so.13: cannot open shared object file", False)


def test_where_everything_is_broken_each_thing_is_a_line(tmp_path: Path) -> None:
    """No params.yaml, torch, NVML, git or DVC repository, and a server that is down: a report, not a traceback."""
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
    assert not [each for each in report["checks"] if "could not be looked at" in each["found"]]
    assert report["problems"] == sum(each["status"] == "problem" for each in report["checks"])


def test_a_failure_that_nobody_foresaw_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Job) -> Finding:
        raise ZeroDivisionError("a bug")

    quick = {"torch": TORCH, "names": Answer({"error": None}), "dvc": Answer({}, "dvc.exceptions.NotDvcRepoError: ...")}
    monkeypatch.setattr(doctor.probes, "ask", lambda name, _: quick[name])
    monkeypatch.setattr(resources, "check_memory", fails)
    findings = {finding.check: finding for finding in doctor.examine(ROOT)}
    assert findings["memory"].found == "could not be looked at: ZeroDivisionError: a bug"
    assert findings["CPU"].status in ("ok", "warning"), "the others go on"


@pytest.mark.parametrize("arguments", [["doctor"], ["doctor", "--json"]])
def test_no_address_is_shown_with_its_secrets(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = Finding("git", "problem", "no answer from https://t0ken@host/x?key=t0ken", "set it to ssh://t0ken:x@host")
    monkeypatch.setattr(doctor, "examine", lambda _: iter([finding]))
    assert cli.main(arguments) == 1
    said = capsys.readouterr().out
    assert "https://***@host/x?***" in said
    assert "t0ken" not in said


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warning", 0), ("not applicable", 0), ("problem", 1)])
def test_only_a_problem_fails(
    status: Any, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda _: iter([Finding("disk", status, "it is so", "do this")]))
    assert cli.main(["doctor"]) == code
    out = capsys.readouterr().out
    assert "disk  it is so\n" in out
    assert "-> do this\n" in out
    assert "\x1b" not in out, "no colour where no terminal is"
    assert cli.main(["doctor", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["checks"] == [
        {"check": "disk", "status": status, "found": "it is so", "remedy": "do this"}
    ]


def test_help_says_how_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--help"])
    assert "with 1 if there is one" in " ".join(capsys.readouterr().out.split())


def test_lines_fit_the_terminal_and_keep_commands_whole() -> None:
    command = "git config --global --add safe.directory /a/very/long/path/" + "x" * 90
    findings = [Finding("git", "problem", "word " * 60, command), Finding("shared memory", "ok", "fine")]
    written = printed.lines(findings, 80, colour=False)
    assert max(len(line) for line in written if "x" * 90 not in line) <= 80
    assert any(line.endswith("/a/very/long/path/" + "x" * 90) for line in written)
    assert [line.index("fine") for line in written if "fine" in line] == [written[0].index("word")], "aligned"
    assert written[-1] == "1 problem(s), 0 warning(s)"
    coloured = printed.lines(findings, 80, colour=True)
    assert coloured[0].startswith("\x1b[1;31mPROBLEM\x1b[0m  git")


@pytest.mark.parametrize(("no_color", "coloured"), [(None, True), ("", True), ("1", False)])
def test_colour_only_on_a_terminal_that_wants_it(
    no_color: str | None, coloured: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda _: iter([Finding("disk", "ok", "free")]))
    monkeypatch.setenv("TERM", "xterm")
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert doctor.run(as_json=False) == 0
    assert ("\x1b[32m" in capsys.readouterr().out) is coloured
