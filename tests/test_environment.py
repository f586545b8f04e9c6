from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pynvml
import pytest

from pipeline import environment
from pipeline.environment import fingerprint, hardware, hash_of, machine, read, software, write
from pipeline.errors import ConfigError, PipelineError
from pipeline.params import COMPILER, parse
from pipeline.plans import plan
from tests.commands import executable, printed
from tests.factories import PLANTED, SECRETS


@dataclass
class Gpu:
    """The driver's answers about one GPU, or about one MIG instance."""

    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    capability: tuple[int, int] | None = (9, 0)
    memory_gib: float | None = 79.6
    power_milliwatts: int | None = 700_000
    instances: list[Gpu | None] | None = None
    """The GPU's MIG instances by index, None for an index without an instance. Without a list, MIG splits no GPU."""
    parent: Gpu | None = field(default=None, repr=False)


Plug = Callable[..., None]
Told = tuple[dict[str, dict[str, Any]], str | None]
NOTHING: Told = ({}, None)
"""CUDA's answer on a machine without a GPU."""


@pytest.fixture
def plug(monkeypatch: pytest.MonkeyPatch) -> Plug:
    """Return ``plug(*gpus, shown=None)``, which simulates a driver with ``gpus``, and CUDA_VISIBLE_DEVICES=``shown``.
    ``answer``: CUDA's own answer; None if the code must not query CUDA."""

    def ask(answer: Told | None) -> Told:
        assert answer is not None, "CUDA was queried, although this needs a process of its own"
        return answer

    def known(value: Any, error: type[pynvml.NVMLError] = pynvml.NVMLError_NotSupported) -> Any:
        if value is None:
            raise error
        return value

    def plug(*gpus: Gpu, shown: str | None = None, cuda: str | None = "13.0", answer: Told | None = NOTHING) -> None:
        everything = [*gpus, *(instance for gpu in gpus for instance in gpu.instances or [] if instance)]
        by_uuid = {device.uuid: device for device in everything}
        memory = pynvml.c_nvmlMemory_t
        driver = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlSystemGetDriverVersion": lambda: "580.65.06",
            "nvmlDeviceGetCount": lambda: len(gpus),
            "nvmlDeviceGetHandleByIndex": lambda index: gpus[index],
            "nvmlDeviceGetHandleByUUID": lambda uuid: known(by_uuid.get(uuid), pynvml.NVMLError_NotFound),
            "nvmlDeviceGetUUID": lambda gpu: gpu.uuid,
            "nvmlDeviceGetName": lambda gpu: gpu.name,
            "nvmlDeviceGetCudaComputeCapability": lambda gpu: known(gpu.capability),
            "nvmlDeviceGetMemoryInfo": lambda gpu: memory(total=int(known(gpu.memory_gib) * 2**30)),
            "nvmlDeviceGetPowerManagementLimit": lambda gpu: known(gpu.power_milliwatts),
            "nvmlDeviceGetMigMode": lambda gpu: known(None) if gpu.instances is None else [1, 1],
            "nvmlDeviceGetMaxMigDeviceCount": lambda gpu: len(gpu.instances),
            "nvmlDeviceGetMigDeviceHandleByIndex": lambda gpu, index: known(
                gpu.instances[index], pynvml.NVMLError_NotFound
            ),
            "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": lambda gpu: gpu.parent,
        }
        monkeypatch.setattr(hardware, "ask_cuda", lambda: ask(answer))
        monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
        for name, function in driver.items():
            monkeypatch.setattr(pynvml, name, function)
        monkeypatch.setattr(software, "torch_build", lambda: {"__version__": "2.11.0+cu130", "cuda": cuda})
        if shown is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)

    return plug


def names() -> list[str]:
    return [gpu["name"] for gpu in fingerprint()["hardware"]["gpus"]]


A, B, C = Gpu("GPU-aaaa1111", "A"), Gpu("GPU-aaaa2222", "B"), Gpu("GPU-cccc", "C")


def test_the_fingerprint_says_what_this_machine_is() -> None:
    recorded = fingerprint()
    assert list(recorded) == ["hash", "hardware", "software", "settings", "relied_on"]
    assert recorded["hardware"]["memory_gib"] == round(psutil.virtual_memory().total / 2**30)
    assert 0 < recorded["hardware"]["cpu"]["cores"] <= (os.cpu_count() or 1)
    assert recorded["software"]["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert json.loads(json.dumps(recorded)) == recorded


def test_the_versions_are_those_that_import() -> None:
    import numpy
    import torch
    import torchvision

    versions = fingerprint()["software"]
    assert versions["numpy"] == numpy.__version__
    assert versions["torch"] == torch.__version__
    assert versions["torchvision"].split("+")[0] == torchvision.__version__.split("+")[0]
    assert software.torch_build()["cuda"] == torch.version.cuda


def test_two_processes_agree() -> None:
    program = "import json; from pipeline.environment import fingerprint; print(json.dumps(fingerprint()))"
    assert json.loads(printed(program)) == fingerprint()


def test_the_fingerprint_names_no_single_machine(plug: Plug, monkeypatch: pytest.MonkeyPatch) -> None:
    plug(A)
    monkeypatch.setenv("HOSTNAME", "node17")
    monkeypatch.setenv("TORCH_HOME", "/home/somebody/.cache/torch")
    monkeypatch.setenv("NCCL_TOPO_FILE", "/home/somebody/topology.xml")
    text = json.dumps(fingerprint())
    for private in ("node17", os.uname().nodename, A.uuid, "somebody"):
        assert private not in text


def test_of_secrets_only_names_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    write(fingerprint(), tmp_path / "environment.json")
    text = (tmp_path / "environment.json").read_text(encoding="utf-8")
    content = json.loads(text)
    assert all(content["settings"][name] is None for name in PLANTED if name != "PIPELINE_IMAGE")
    assert content["software"]["image"] == "https://***@registry.example/pipeline?***"
    assert not [secret for secret in SECRETS if secret in text]
    before = content["hash"]
    monkeypatch.setenv("NCCL_SECRET", "another")
    assert fingerprint()["hash"] == before, "the hash depends on the secret, so the secret could be guessed"
    monkeypatch.delenv("NCCL_SECRET")
    assert fingerprint()["hash"] != before, "the hash does not depend on whether the variable is set"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OMP_PLACES", "{0:4},{4:4}"),
        ("NCCL_IB_HCA", "^mlx5_3,mlx5_5"),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:native,garbage_collection_threshold:0.6,expandable_segments:True"),
        ("LD_PRELOAD", "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"),
        ("NCCL_SOMETHING_NEW", "64K"),
        ("TORCH_SOMETHING_NEW", "True"),
        ("OMP_SOMETHING_NEW", "-1.5"),
    ],
)
def test_a_setting_is_recorded_with_its_value(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert software.variables()[name] == value


@pytest.mark.parametrize("library", ["GLOO", "NCCL"])
def test_an_interface_is_no_setting(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint()["hash"]
    monkeypatch.setenv(f"{library}_SOCKET_IFNAME", "eth7")
    assert fingerprint()["hash"] == before


def test_the_hash_covers_each_host_and_its_link() -> None:
    ethernet, infiniband = ({"link": link, "megabit_per_second": 100_000} for link in ("ethernet", "infiniband"))
    links = [[], [ethernet] * 2, [ethernet] * 3, [infiniband] * 2]
    assert len({fingerprint(links=of_hosts)["hash"] for of_hosts in links}) == 4


@pytest.mark.parametrize(("spins", "is_recorded"), [("1000", False), ("300000", False), ("7", True)])
def test_chosen_spins_are_no_part_of_the_environment(
    spins: str, is_recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", spins)
    assert ("GOMP_SPINCOUNT" in software.variables()) == is_recorded


def test_write_leaves_an_equal_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "environment.json"
    written = write(fingerprint(), path)
    assert read(path) == fingerprint()
    assert written == fingerprint()["hash"]
    os.utime(path, ns=(1, 1))
    assert write(fingerprint(), path) == written
    assert path.stat().st_mtime_ns == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert write(fingerprint(), path) != written
    assert path.stat().st_mtime_ns != 1
    assert json.loads(path.read_text(encoding="utf-8"))["settings"]["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize("content", [None, "{", "[]", '{"hardware": {}}'])
def test_a_file_that_holds_no_fingerprint_is_refused(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "environment.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(PipelineError, match=r"environment\.json .*dvc repro"):
        read(path)


COUNT = (
    "OMP_NUM_THREADS KMP_AFFINITY NCCL_ALGO CUDA_LAUNCH_BLOCKING CUDA_DEVICE_MAX_CONNECTIONS CUBLAS_WORKSPACE_CONFIG "
    "TORCH_CUDNN_V8_API_DISABLED TORCHINDUCTOR_MAX_AUTOTUNE PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF LD_PRELOAD "
    "NVIDIA_TF32_OVERRIDE PIPELINE_IMAGE"
)
DO_NOT_COUNT = (
    "HOME HOSTNAME DVC_STAGE MLFLOW_TRACKING_URI NCCL_DEBUG NCCL_DEBUG_FILE NCCL_VERSION TORCH_LOGS CUDA_HOME "
    "CUDA_CACHE_PATH TORCHINDUCTOR_CACHE_DIR TORCHELASTIC_RUN_ID"
)


@pytest.mark.parametrize("name", COUNT.split())
def test_a_variable_that_changes_numbers_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name, raising=False)
    before = fingerprint()
    monkeypatch.setenv(name, "2")
    assert fingerprint()["hash"] != before["hash"]


@pytest.mark.parametrize("name", DO_NOT_COUNT.split())
def test_a_variable_that_changes_no_number_does_not_count(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint()
    monkeypatch.setenv(name, "anything")
    assert fingerprint() == before


@pytest.mark.parametrize(
    ("shown", "visible"),
    [
        (None, "ABC"),
        ("0", "A"),
        ("2,0", "CA"),
        (" 1 , 2", "BC"),
        ("", ""),
        ("-1", ""),
        ("0,-1,2", "A"),
        ("0,0", ""),
        ("1gpu2,2x", "BC"),
        ("GPU-cccc", "C"),
        ("GPU-aaaa", ""),
        ("GPU-cccc,GPU-dddd,GPU-aaaa1", "C"),
        ("GPU-cccc,GPU-cc", ""),
    ],
)
def test_cuda_visible_devices_as_cuda_reads_it(plug: Plug, shown: str | None, visible: str) -> None:
    plug(A, B, C, shown=shown)
    assert names() == list(visible)
    assert machine().gpus == len(visible)


def test_the_recorded_facts_of_a_gpu(plug: Plug) -> None:
    plug(Gpu("GPU-1", "H100"), Gpu("GPU-2", "Shared", (12, 1), None, None))
    recorded = fingerprint()
    assert recorded["hardware"]["gpus"] == [
        {"name": "H100", "compute_capability": "9.0", "memory_gib": 80, "power_limit_watts": 700},
        {"name": "Shared", "compute_capability": "12.1", "memory_gib": None, "power_limit_watts": None},
    ]
    assert recorded["software"]["driver"] == "580.65.06"
    assert recorded["software"]["cuda"] == "13.0"
    assert {"cublas", "cudnn", "nccl"} < set(recorded["software"])


def test_another_gpu_setting_is_another_environment(plug: Plug, monkeypatch: pytest.MonkeyPatch) -> None:
    plug(Gpu("GPU-1"))
    hashes = [fingerprint()["hash"]]
    plug(Gpu("GPU-9"))
    assert fingerprint()["hash"] == hashes[0], "another GPU of the same model made another environment"
    for gpus in ([Gpu("GPU-1"), Gpu("GPU-2")], [Gpu("GPU-1", "Other")], [Gpu("GPU-1", power_milliwatts=350_000)], []):
        plug(*gpus)
        hashes.append(fingerprint()["hash"])
    plug(Gpu("GPU-1"))
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "590.1")
    hashes.append(fingerprint()["hash"])
    assert len(set(hashes)) == len(hashes)


def test_the_compiler_s_version_counts_where_relied_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "g++"
    monkeypatch.setenv("CXX", f"{compiler} -O2")
    relying, plain = [], []
    for version in (None, "12.2.0", "14.1.0"):
        if version is not None:
            executable(compiler, f"#!/bin/sh\nprintf 'g++ {version}\\nCopyright\\n'\n")
        recorded = fingerprint({"variants": {"plain": set(), "fast": {COMPILER}, "also": set()}, "forms": {}})
        relying.append(
            (recorded["relied_on"]["variants"]["fast"][COMPILER], hash_of(recorded, "variants", "fast", "plain"))
        )
        plain.append(
            (recorded["hash"], hash_of(recorded, "variants", "plain"), hash_of(recorded, "variants", "plain", "also"))
        )
    assert [version for version, _ in relying] == [None, "g++ 12.2.0", "g++ 14.1.0"]
    assert len({digest for _, digest in relying}) == 3
    assert {digest for digests in plain for digest in digests} == {fingerprint()["hash"]}, (
        "the hash of variants that compile nothing depends on the compiler"
    )


def test_an_extra_s_version_counts_where_relied_on(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = []
    for version in ("0.50.1", "0.50.2"):
        monkeypatch.setattr(software, "version", lambda name, version=version: f"{name} {version}")
        recorded = fingerprint({"forms": {"int8": {"torchao"}}})
        assert recorded["relied_on"]["forms"]["int8"] == {"torchao": f"torchao {version}"}
        hashes.append(hash_of(recorded, "forms", "int8"))
    assert hashes[0] != hashes[1]


def test_a_torch_without_cuda_sees_no_gpu(plug: Plug) -> None:
    plug(A, cuda=None)
    assert names() == []
    assert machine().gpus == 0
    assert not {"driver", "cuda", "cudnn", "nccl"} & set(fingerprint()["software"])


@pytest.mark.parametrize(
    ("shown", "visible"),
    [(None, ["1g"]), ("1", ["whole"]), ("1,0", ["1g"]), ("MIG-2", ["2g"]), ("MIG-2,MIG-1", ["2g"]), ("MIG-9", [])],
)
def test_of_split_gpus_cuda_shows_one_instance(plug: Plug, shown: str | None, visible: list[str]) -> None:
    split = Gpu("GPU-0", "split", instances=[])
    split.instances = [
        None,
        Gpu("MIG-1", "1g", None, 9.9, None, parent=split),
        Gpu("MIG-2", "2g", None, 19.8, None, parent=split),
    ]
    plug(split, Gpu("GPU-1", "whole"), shown=shown)
    assert names() == visible
    assert all(gpu["compute_capability"] == "9.0" for gpu in fingerprint()["hardware"]["gpus"])


def on_cuda(**names: str) -> Told:
    """Return CUDA's answer about GPUs. ``names``: UUID -> name."""
    about = {"compute_capability": "9.0", "memory_gib": 79}
    return {uuid: {"name": name} | about for uuid, name in names.items()}, None


SLOW, FAST = Gpu("GPU-a", "T400", (7, 5)), Gpu("GPU-b", "H100")


@pytest.mark.parametrize(
    ("order", "answer", "seen"),
    [
        (None, on_cuda(b="H100", a="T400"), ["H100", "T400"]),
        ("FASTEST_FIRST", on_cuda(b="H100"), ["H100"]),
        ("PCI_BUS_ID", None, ["T400", "H100"]),
        (None, ({}, "CUDA's error 999"), ["T400", "H100"]),
        (None, on_cuda(c="H100"), ["T400", "H100"]),
    ],
)
def test_different_gpus_are_in_cuda_s_order(
    plug: Plug, monkeypatch: pytest.MonkeyPatch, order: str | None, answer: Told | None, seen: list[str]
) -> None:
    plug(SLOW, FAST, answer=answer)
    if order:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    assert names() == seen
    assert machine().gpus == len(seen)


@pytest.mark.parametrize("shown", [None, "1", "GPU-cccc", ""])
def test_cuda_is_not_queried_if_all_gpus_are_equal(plug: Plug, shown: str | None) -> None:
    plug(Gpu("GPU-aaaa"), Gpu("GPU-cccc"), shown=shown, answer=None)
    assert machine().gpus == (0 if shown == "" else 2 if shown is None else 1)


ERRORS = [pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_Unknown, pynvml.NVMLError_GpuIsLost]


@pytest.fixture(params=[("nvmlInit", ERRORS[0]), ("nvmlDeviceGetCudaComputeCapability", ERRORS[2])])
def no_nvml(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that makes one of NVML's functions fail. A container without the capability "utility" has no
    NVML library."""
    call, error = request.param

    def fail(*_: object) -> None:
        raise error

    return lambda: monkeypatch.setattr(pynvml, call, fail)


def test_without_nvml_cuda_s_gpus_count(
    plug: Plug, no_nvml: Callable[[], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plug(A, answer=on_cuda(a="H100", b="H100"))
    no_nvml()
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U16)"
    (tmp_path / "version").write_text(line, encoding="utf-8")
    monkeypatch.setattr(hardware, "KERNEL_DRIVER", tmp_path / "version")
    recorded = fingerprint()
    h100 = {"name": "H100", "compute_capability": "9.0", "memory_gib": 79, "power_limit_watts": None}
    assert recorded["hardware"]["gpus"] == [h100, h100]
    assert recorded["software"]["driver"] == "580.65.06"
    (tmp_path / "version").unlink()
    assert fingerprint()["software"]["driver"] is None
    able = machine()
    assert (able.gpus, able.gpu_native_bf16, able.why_no_gpu) == (2, True, None)
    made = plan(parse({"variants": {"baseline": {}}}), "baseline", able)
    assert (made.device, made.skipped) == ("cuda", {})


def test_a_gpu_that_cannot_be_used_is_reported(plug: Plug, no_nvml: Callable[[], None]) -> None:
    plug(A, answer=({}, "CUDA's error 802"))
    no_nvml()
    made = plan(parse({"variants": {"baseline": {}}}), "baseline", machine())
    assert (made.device, made.skipped) == ("cpu", {"GPU": "CUDA's error 802"})
    asked = plan(parse({"train": {"device": "cpu"}, "variants": {"baseline": {}}}), "baseline", machine())
    assert asked.skipped == {}
    with pytest.raises(ConfigError, match=r"found 'cuda', but no GPU can be used here \(CUDA's error 802\)"):
        plan(parse({"train": {"device": "cuda"}, "variants": {"baseline": {}}}), "baseline", machine())


def test_a_missing_driver_is_no_failure(plug: Plug, monkeypatch: pytest.MonkeyPatch) -> None:
    plug(A)
    for error, why in zip(ERRORS, (None, "NVML says: Unknown Error", "NVML says: GPU is lost"), strict=True):

        def fail(error: type[pynvml.NVMLError] = error) -> None:
            raise error

        monkeypatch.setattr(pynvml, "nvmlInit", fail)
        assert machine().why_no_gpu == why


TORCH = """
import os, sys
from types import SimpleNamespace


class cuda:
    def init():
        {init}

    def device_count():
        return 1 if os.environ.get("CUDA_VISIBLE_DEVICES") else 2

    def get_device_properties(index):
        return SimpleNamespace(uuid=f"uuid-{{index}}", name="H100", major=9, minor=index, total_memory=80 * 10**9)
"""
"""The source of a module that stands in for torch."""


@pytest.mark.parametrize(
    ("init", "failure"),
    [
        ("pass", None),
        ("raise RuntimeError('no driver')", "CUDA cannot be used: RuntimeError: no driver"),
        ("raise RuntimeError('Found no NVIDIA driver on your system.')", None),
        ("os._exit(3)", "CUDA cannot be used: the process ended with 3"),
        ("import time; time.sleep(60)", "CUDA did not answer within 1 s"),
    ],
)
def test_cuda_is_asked_in_a_process_of_its_own(
    init: str, failure: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text(TORCH.format(init=init), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(hardware, "CUDA_LIBRARY", "libm.so.6")
    if "sleep" in init:
        monkeypatch.setattr(hardware, "CUDA_SECONDS", 1.0)
    h100 = {"name": "H100", "compute_capability": "9.0", "memory_gib": 75}
    asked = {} if init != "pass" else {"uuid-0": h100, "uuid-1": h100 | {"compute_capability": "9.1"}}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    ask = hardware.ask_cuda.__wrapped__
    assert ask() == (asked, failure)
    if asked:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        assert ask() == ({"uuid-0": h100}, None), "CUDA's process did not get this process's variables"
    monkeypatch.setattr(hardware, "CUDA_LIBRARY", "libnone.so.1")
    assert ask() == NOTHING, "without CUDA's library there are no GPUs"


@pytest.mark.parametrize(
    ("capabilities", "bf16", "float8"),
    [
        ([], False, False),
        ([(7, 5)], False, False),
        ([(8, 0)], True, False),
        ([(8, 9), (7, 0)], False, False),
        ([(8, 9), (9, 0)], True, True),
    ],
)
def test_native_bf16_and_float8_need_every_gpu(
    plug: Plug, capabilities: list[tuple[int, int]], bf16: bool, float8: bool
) -> None:
    plug(*(Gpu(f"GPU-{index}", capability=capability) for index, capability in enumerate(capabilities)))
    assert (machine().gpu_native_bf16, machine().gpu_float8) == (bf16, float8)


@pytest.mark.parametrize(
    ("cpuinfo", "model", "flags", "native"),
    [
        ("model name\t: Xeon\nflags\t\t: fpu avx2\n\nmodel name\t: Other\n", "Xeon", ["avx2"], False),
        ("model name\t: Xeon\nflags\t\t: avx2 avx512_bf16\n", "Xeon", ["avx2", "avx512_bf16"], True),
        ("Features\t: fp bf16\nCPU implementer\t: 0x41\nCPU part\t: 0xd4\n", "0x41 0xd4", ["bf16"], True),
    ],
)
def test_the_recorded_facts_of_a_cpu(
    cpuinfo: str, model: str, flags: list[str], native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo, encoding="utf-8")
    monkeypatch.setattr(hardware, "CPUINFO", tmp_path / "cpuinfo")
    cpu = fingerprint()["hardware"]["cpu"]
    assert (cpu["model"], cpu["flags"]) == (model, flags)
    assert machine().cpu_native_bf16 is native


def test_a_system_without_proc_cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "CPUINFO", tmp_path / "missing")
    assert fingerprint()["hardware"]["cpu"]["model"]
    assert machine().cpu_native_bf16 is False


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/pod/box\n", {"pod/cpu.max": "50000 100000\n", "pod/box/cpu.max": "max 100000\n"}, 0.5),
        ("0::/seen/only/outside\n", {"cpu.max": "100000 100000\n", "memory.max": "1048576\n"}, 1),
        ("3:cpu,x:/box\n", {"cpu/box/cpu.cfs_quota_us": "25000\n", "cpu/box/cpu.cfs_period_us": "100000\n"}, 0.25),
        ("2:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ("4:memory:/a\n3:cpu:/b\n", {"memory/a/memory.limit_in_bytes": "1048576\n"}, None),
    ],
)
def test_control_groups_limit_cores_and_memory(
    membership: str, files: dict[str, str], cores: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "membership").write_text(membership, encoding="utf-8")
    for name, content in files.items():
        (tmp_path / "mount" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mount" / name).write_text(content, encoding="utf-8")
    monkeypatch.setattr(hardware, "CGROUP_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(hardware, "CGROUP_MOUNT", tmp_path / "mount")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert fingerprint()["hardware"]["cpu"]["cores"] == (2 if cores is None else cores)
    assert set(environment.memory_limits()) == ({2**20} if "1048576\n" in files.values() else set())


@pytest.mark.gpu
def test_the_gpus_are_those_that_torch_sees() -> None:
    import torch

    assert machine().gpus == torch.cuda.device_count()
    for index, gpu in enumerate(fingerprint()["hardware"]["gpus"]):
        properties = torch.cuda.get_device_properties(index)
        assert gpu["name"] == properties.name
        assert gpu["compute_capability"] == f"{properties.major}.{properties.minor}"
