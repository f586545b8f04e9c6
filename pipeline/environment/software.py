"""Find the versions of the software that numbers depend on, and what torch.compile lacks, without importing torch.

``variables`` returns the environment variables that change how fast a step is, how much memory it takes, or how it
rounds.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from pipeline.params import COMPILER
from pipeline.processes import LONG_SPINS, SHORT_SPINS


def torch_build() -> dict[str, str | None]:
    """Return torch's ``__version__`` (with its build) and ``cuda`` (None in a CPU build), without importing torch."""
    spec = importlib.util.find_spec("torch")
    values = runpy.run_path(str(Path(spec.origin).with_name("version.py"))) if spec and spec.origin else {}
    return {name: values.get(name) for name in ("__version__", "cuda")}


def cuda_libraries() -> dict[str, str | None]:
    """Return the versions of NVIDIA's libraries from the wheels that torch depends on; None for a missing wheel."""
    major = (torch_build()["cuda"] or "").split(".")[0]
    return {
        library: version(f"nvidia-{library}-cu{major}") or version(f"nvidia-{library}")
        for library in ("cublas", "cudnn", "nccl")
    }


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_of_optional(name: str) -> str | None:
    return _version_of_command(cpu_compiler()) if name == COMPILER else version(name)


def _version_of_command(command: str) -> str | None:
    """Return the first line that ``command --version`` prints; None if the command cannot be run."""
    try:
        done = subprocess.run([*shlex.split(command), "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.partition("\n")[0] or None


def cpu_compiler() -> str:
    """Return the command with which torch.compile builds CPU kernels (``cpp.cxx`` in torch/_inductor/config.py)."""
    return os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")


def gpu_compiler() -> str:
    """Return the compiler command that Triton uses for GPU kernels (``_build`` in triton/runtime/build.py)."""
    return os.environ.get("CC", shutil.which("gcc") or shutil.which("clang") or "gcc")


def no_kernels(compiler: str, module: str | None = None) -> str | None:
    """Return why torch.compile cannot build kernels with the command ``compiler`` and the Python module ``module``. If
    it can, return None.

    Kernels for the CPU and for GPUs both need Python's headers.
    """
    header = Path(sysconfig.get_path("include"), "Python.h")
    if module and importlib.util.find_spec(module) is None:
        return f"it needs the Python module {module}, which comes with torch for CUDA: pip install {module}"
    if not (command := shlex.split(compiler)) or shutil.which(command[0]) is None:
        return (
            f"there is no compiler {compiler!r} (the variables CXX and CC can name another compiler); on Debian and "
            "Ubuntu: apt-get install g++"
        )
    if not header.exists():
        return f"Python's headers are missing ({header}); on Debian and Ubuntu: apt-get install python3-dev"
    return None


_NAMES = """
ATEN_CPU_CAPABILITY GLIBC_TUNABLES LD_PRELOAD MALLOC_CONF

OMP_NUM_THREADS OMP_PLACES OMP_PROC_BIND OMP_SCHEDULE OMP_WAIT_POLICY GOMP_CPU_AFFINITY GOMP_SPINCOUNT
KMP_AFFINITY KMP_BLOCKTIME KMP_FORCE_REDUCTION KMP_HW_SUBSET KMP_LIBRARY
MKL_CBWR MKL_DOMAIN_NUM_THREADS MKL_ENABLE_INSTRUCTIONS MKL_INTERFACE_LAYER MKL_THREADING_LAYER OPENBLAS_CORETYPE
ONEDNN_CPU_ISA_HINTS ONEDNN_DEFAULT_FPMATH_MODE ONEDNN_MAX_CPU_ISA
DNNL_CPU_ISA_HINTS DNNL_DEFAULT_FPMATH_MODE DNNL_MAX_CPU_ISA

CUBLAS_EMULATION_STRATEGY CUBLAS_WORKSPACE_CONFIG CUDA_DEVICE_ORDER CUDA_MODULE_DATA_LOADING CUDA_MODULE_LOADING
CUDA_MPS_PINNED_DEVICE_MEM_LIMIT CUDA_SCALE_LAUNCH_QUEUES
PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF TORCH_DISTRIBUTED_DEBUG
TORCHINDUCTOR_CPP_MARCH TORCHINDUCTOR_MAX_AUTOTUNE_CONV_BACKENDS TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS
TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_SEARCH_SPACE TORCHINDUCTOR_NUMERICS TRITON_F32_DEFAULT

GLOO_DEVICE_TRANSPORT NCCL_ALGO NCCL_CTA_POLICY NCCL_IB_HCA NCCL_LAUNCH_MODE NCCL_NET
NCCL_NET_GDR_LEVEL NCCL_NET_PLUGIN NCCL_P2P_LEVEL NCCL_PROTO NCCL_SOCKET_FAMILY NCCL_TUNER_PLUGIN
"""

RECORDED = frozenset(_NAMES.split())
"""Variables whose values the fingerprint shows, even if the values are words, unless a word looks like a secret. The
names are from PyTorch's code and the documentation of CUDA, NCCL, OpenMP and the CPU libraries. Words in other
variables are not shown: they can be secrets."""

_PLAIN = re.compile(r"(?i)[+-]?\d{1,10}(\.\d{1,3})?[kmg]?b?|true|false|yes|no|on|off")
"""Matches numbers, sizes and switches, which the fingerprint shows for each variable of the families below."""

_FAMILIES = re.compile(
    r"(ATEN|OMP|GOMP|KMP|MKL|OPENBLAS|ONEDNN|DNNL|MALLOC|GLOO|NCCL|CUDA|CUBLAS|CUBLASLT|CUDNN|NVIDIA_TF32|TORCH"
    r"|TORCHINDUCTOR|PYTORCH|TRITON)_.+"
)
_NO_SETTINGS = re.compile(
    # Paths and log settings change no number; the GPUs that CUDA_VISIBLE_DEVICES shows, and the link between hosts, are
    # in the fingerprint already.
    r".*(_HOME|_PATH|_DIR|_DIRECTORY|_FILE|_LOGS?|_LOG_LEVEL|_VERSION|_SOCKET_IFNAME)|NCCL_DEBUG.*|CUDA_VISIBLE_DEVICES"
)
_MAY_BE_SECRET = re.compile(r"://|@|(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{20}")
"""Matches an address, or a word with 20 letters and digits, such as an access token; no setting looks like this."""


def variables() -> dict[str, str | None]:
    """Return the variables that are set, by name. None stands for a value that may be a secret.

    Not even a digest of such a value is recorded: a short secret can be guessed and compared with its digest. Numbers
    of spins that this pipeline chooses by the machine's load are left out, since sessions under both can be combined.
    """
    chosen = {"GOMP_SPINCOUNT": {str(SHORT_SPINS), str(LONG_SPINS)}}
    return {
        name: value if _PLAIN.fullmatch(value) or (name in RECORDED and not _MAY_BE_SECRET.search(value)) else None
        for name, value in sorted(os.environ.items())
        if name in RECORDED or (_FAMILIES.fullmatch(name) and not _NO_SETTINGS.fullmatch(name))
        if value not in chosen.get(name, ())
    }
