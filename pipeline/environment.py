"""The environment's fingerprint: what a measured number depends on beyond code and parameters.

Two machines with the same hardware, software and settings share it. So it carries no time, host name, serial number or
UUID. The kernel's release is left out on purpose: it changes with every security update and would discard all results.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Literal

from pipeline.config import COMPILER, Machine, PipelineError, outside
from pipeline.results import write_text

ENVIRONMENT_FILE = Path("environment.json")

CPUINFO = Path("/proc/cpuinfo")
CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")
CGROUP_MOUNT = Path("/sys/fs/cgroup")

IMAGE_VARIABLE = "PIPELINE_IMAGE"
"""Set by a container image to its own identity (a digest or tag)."""

_CPU_FLAGS = (
    *("avx", "avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx_vnni"),
    *("amx_bf16", "amx_fp16", "amx_int8", "asimd", "asimdhp", "bf16", "i8mm", "sve", "sve2"),
)
"""The instruction sets among which the CPU kernels choose."""

_NATIVE_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
_NATIVE_BF16_CAPABILITY = (8, 0)
_TF32_CAPABILITY = (8, 0)

_OPTIONAL_LIBRARIES = ("bitsandbytes",)
"""What the extras of pyproject.toml bring for techniques."""

ReliedOn = Mapping[str, Mapping[str, AbstractSet[str]]]
"""What ``config.relied_on`` returns: section -> who -> names."""

_SETTINGS = re.compile(
    r"(OMP|GOMP|KMP|MKL|OPENBLAS|ONEDNN|DNNL|MALLOC|GLOO|NCCL|CUDA|CUBLAS|CUBLASLT|CUDNN|NVIDIA_TF32|TORCH|TORCHINDUCTOR"
    r"|PYTORCH|TRITON)_.+|LD_PRELOAD"
)
_NO_SETTINGS = re.compile(
    # Places and messages change no number; what CUDA_VISIBLE_DEVICES shows is listed as the GPUs themselves.
    r".*(_HOME|_PATH|_DIR|_DIRECTORY|_FILE|_LOGS?|_LOG_LEVEL|_VERSION)|NCCL_DEBUG.*|CUDA_VISIBLE_DEVICES"
)


def fingerprint(relied_on: ReliedOn | None = None) -> dict[str, Any]:
    """``{"hash", "hardware", "software", "settings", "relied_on"}``; the hash (SHA-256, hexadecimal) covers the three
    between, on which every number depends.

    Sizes are whole GiB, powers watts; ``None`` means unknown. ``relied_on`` (``config.relied_on``) names what is
    optional, and who uses it: its versions stand apart, because nobody else's numbers depend on them. Take it in the
    process that a person started: launchers set variables such as OMP_NUM_THREADS in their workers.
    """
    gpus, driver = _gpus()
    cpu = _cpu_facts()
    flags = _flags(cpu)
    content: dict[str, Any] = {
        "hardware": {
            "cpu": {
                "model": _cpu_model(cpu),
                "cores": cores(),
                "flags": [flag for flag in _CPU_FLAGS if flag in flags],
            },
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
            "gpus": gpus,
        },
        "software": {
            "system": f"{platform.system()} {platform.machine()}",
            "image": os.environ.get(IMAGE_VARIABLE) or None,
            "python": f"{sys.version_info.major}.{sys.version_info.minor}",
            "numpy": _version("numpy"),
            "torch": _torch()["__version__"],
            "torchvision": _version("torchvision"),
        },
        "settings": {
            name: value
            for name, value in sorted(os.environ.items())
            if _SETTINGS.fullmatch(name) and not _NO_SETTINGS.fullmatch(name)
        },
    }
    if outside.packages():
        content["software"]["techniques"] = outside.packages()
    if gpus:  # without a GPU these are installed but not used
        content["software"] |= {"driver": driver, "cuda": _torch()["cuda"], **_cuda_libraries()}
    versions = {
        section: {user: {name: _version_of_optional(name) for name in sorted(names)} for user, names in users.items()}
        for section, users in (relied_on or {}).items()
    }
    return {"hash": _sha256(content), **content, "relied_on": versions}


def hash_of(content: Mapping[str, Any], section: Literal["variants", "forms"], *users: str) -> str:
    """Of all that the numbers of ``users`` depend on: the fingerprint's hash, if they rely on nothing optional.

    ``content``: a fingerprint.
    """
    known = content.get("relied_on", {}).get(section, {})
    versions = {name: version for user in users for name, version in known.get(user, {}).items()}
    return _sha256([content["hash"], versions]) if versions else str(content["hash"])


def write(path: Path = ENVIRONMENT_FILE, relied_on: ReliedOn | None = None) -> str:
    """Make ``path`` hold the fingerprint, and return its hash. An equal file is left alone."""
    found = fingerprint(relied_on)
    text = json.dumps(found, indent=2) + "\n"
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_text(path, text)
    return str(found["hash"])


def read(path: Path = ENVIRONMENT_FILE) -> dict[str, Any]:
    """The fingerprint that ``write`` left there. Raises PipelineError if it is missing or is none."""
    again = "run `dvc repro`, or `python -m pipeline environment`."
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PipelineError(f"{path} is missing, so nobody knows where results are measured: {again}") from None
    except ValueError as error:
        raise PipelineError(f"{path} is not JSON: {again} ({error})") from None
    if not isinstance(content, dict) or not isinstance(content.get("hash"), str):
        raise PipelineError(f"{path} holds no environment's fingerprint: {again}")
    return content


def checked_out() -> str | None:
    """The commit of the code that is here, with "+" if files differ from it; None without git or a commit.

    What ``dvc repro`` itself writes does not count: dvc.lock and the reports that git keeps.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(("git", *arguments), capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", ".", ":(exclude)dvc.lock", ":(exclude)reports")
        return git("rev-parse", "--verify", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def machine() -> Machine:
    """What variants can be planned for here."""
    gpus, _ = _gpus()
    capabilities = [tuple(map(int, gpu["compute_capability"].split("."))) for gpu in gpus]
    return Machine(
        gpus=len(gpus),
        gpu_native_bf16=bool(gpus) and min(capabilities) >= _NATIVE_BF16_CAPABILITY,
        cpu_native_bf16=bool(_flags(_cpu_facts()) & _NATIVE_BF16_FLAGS),
        gpu_tf32=bool(gpus) and min(capabilities) >= _TF32_CAPABILITY,
        trims_memory=hasattr(ctypes.CDLL(None), "malloc_trim"),
        installed=frozenset(name for name in _OPTIONAL_LIBRARIES if importlib.util.find_spec(name)),
        no_cpu_kernels=_no_kernels(_cpu_compiler()),
        no_gpu_kernels=_no_kernels(
            os.environ.get("CC", shutil.which("gcc") or shutil.which("clang") or "gcc"), "triton"
        ),
    )


def _cpu_compiler() -> str:
    """The command with which torch.compile builds kernels for the CPU (``cpp.cxx`` in torch/_inductor/config.py)."""
    return os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")


def _no_kernels(compiler: str, module: str | None = None) -> str | None:
    """Why torch.compile cannot build kernels with ``compiler``, a command, and ``module``; None if it can.

    For GPUs it takes the command from the same variables and names as _build in triton/runtime/build.py. Both compile
    against Python's headers.
    """
    header = Path(sysconfig.get_path("include"), "Python.h")
    if module and importlib.util.find_spec(module) is None:
        return f"it needs the Python module {module}, which comes with torch for CUDA: pip install {module}"
    if not (command := shlex.split(compiler)) or shutil.which(command[0]) is None:
        return (
            f"there is no compiler {compiler!r} (the variables CXX and CC name others); on Debian and Ubuntu: "
            "apt-get install g++"
        )
    if not header.exists():
        return f"Python's headers are missing ({header}); on Debian and Ubuntu: apt-get install python3-dev"
    return None


def _gpus() -> tuple[list[dict[str, Any]], str | None]:
    """The GPUs that CUDA shows to this process, in its order, and the driver's version; none without a driver."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if _torch()["cuda"] is None or shown == "":
        return [], None
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return [], None
    try:
        if shown is not None and shown.startswith("MIG-"):
            handles = [pynvml.nvmlDeviceGetHandleByUUID(shown.split(",")[0].strip())]
        else:
            present = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            chosen = visible(shown, [pynvml.nvmlDeviceGetUUID(handle) for handle in present])
            handles = _split([present[index] for index in chosen])
        return [_gpu(handle) for handle in handles], pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError_NotFound:  # an instance of a GPU that does not exist: CUDA shows nothing
        return [], None
    finally:
        pynvml.nvmlShutdown()


def visible(shown: str | None, uuids: Sequence[str]) -> list[int]:
    """The indices into ``uuids`` that CUDA_VISIBLE_DEVICES=``shown`` leaves visible, in its order.

    CUDA's rules: the list ends at the first entry that names no GPU, and a GPU named twice leaves none. An entry is a
    number or the beginning of a UUID that fits one GPU.
    """
    if shown is None:
        return list(range(len(uuids)))
    chosen: list[int] = []
    for entry in map(str.strip, shown.split(",")):
        if entry.startswith("GPU-"):
            fitting = [index for index, uuid in enumerate(uuids) if uuid.startswith(entry)]
        else:
            number = re.match(r"\d+", entry)
            fitting = [int(number[0])] if number and int(number[0]) < len(uuids) else []
        if len(fitting) != 1:
            break
        chosen += fitting
    return chosen if len(set(chosen)) == len(chosen) else []


def _split(handles: Sequence[Any]) -> list[Any]:
    """``handles`` as CUDA sees them where a GPU is split into instances (MIG): the first instance, and nothing else."""
    import pynvml

    for handle in handles:
        try:
            if pynvml.nvmlDeviceGetMigMode(handle)[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
                continue
        except pynvml.NVMLError:  # a GPU that cannot be split
            continue
        for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            try:
                return [pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)]
            except pynvml.NVMLError_NotFound:
                continue
        return []
    return list(handles)


def _gpu(handle: Any) -> dict[str, Any]:
    import pynvml

    try:
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    except pynvml.NVMLError:  # an instance of a GPU has its parent's
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(
            pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        )

    def rounded(read: Callable[[], float]) -> int | None:
        try:
            return round(read())
        except pynvml.NVMLError:  # not told, as the memory of a GPU that shares the host's
            return None

    return {
        "name": pynvml.nvmlDeviceGetName(handle),
        "compute_capability": f"{major}.{minor}",
        "memory_gib": rounded(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30),
        "power_limit_watts": rounded(lambda: pynvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000),
    }


def _cpu_facts() -> dict[str, str]:
    """The first processor's entry in /proc/cpuinfo; empty where there is none.

    It is not kept, but read as seldom as can be: Linux makes it up for all processors each time.
    """
    try:
        first = CPUINFO.read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _cpu_model(facts: Mapping[str, str]) -> str:
    arm = [facts[key] for key in ("CPU implementer", "CPU part") if key in facts]
    return facts.get("model name") or " ".join(arm) or platform.processor() or platform.machine()


def _flags(facts: Mapping[str, str]) -> set[str]:
    return set((facts.get("flags") or facts.get("Features") or "").split())


def cores() -> float:
    """Cores this process may use: its affinity, and the quota of every control group around it."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([allowed, *_quotas()])


def _quotas() -> Iterator[float]:
    """CPU quotas in cores, from control groups of version 1 and 2."""
    for group in control_groups("cpu"):
        yield from _quota(group)


def control_groups(controller: str) -> Iterator[Path]:
    """Where this process's control group and those around it may stand, of version 1 and 2; not all of them exist."""
    try:
        lines = CGROUP_MEMBERSHIP.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for hierarchy in (controllers, controller) if controllers else ("", "unified"):
            # A container may see its own group as the mount itself, so try every level that exists.
            for level in (Path(group.lstrip("/")), *Path(group.lstrip("/")).parents):
                yield CGROUP_MOUNT / hierarchy / level


def _quota(group: Path) -> Iterator[float]:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text(encoding="utf-8").split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text(encoding="utf-8").strip()
            period = (group / "cpu.cfs_period_us").read_text(encoding="utf-8").strip()
    except OSError:
        return
    if quota not in ("max", "-1"):
        yield round(int(quota) / int(period), 2)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _version_of_optional(name: str) -> str | None:
    return _version_of_command(_cpu_compiler()) if name == COMPILER else _version(name)


def _version_of_command(command: str) -> str | None:
    """The first line of what ``command --version`` prints; None if it cannot be run."""
    try:
        done = subprocess.run([*shlex.split(command), "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.partition("\n")[0] or None


def _torch() -> dict[str, str | None]:
    """``__version__`` (with its build) and ``cuda``, None in a CPU build, read without importing torch."""
    found: dict[str, str | None] = {"__version__": None, "cuda": None}
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return found
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    for name in found:
        value = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        found[name] = value[1] if value else None
    return found


def _cuda_libraries() -> dict[str, str | None]:
    """Versions of NVIDIA's libraries, from the wheels that torch's own wheel brings; None where it brings none."""
    major = (_torch()["cuda"] or "").split(".")[0]
    return {
        library: _version(f"nvidia-{library}-cu{major}") or _version(f"nvidia-{library}")
        for library in ("cublas", "cudnn", "nccl")
    }


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
