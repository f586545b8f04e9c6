"""Find the versions of the software that numbers depend on, and what torch.compile lacks, without importing torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from pipeline.params import COMPILER


def torch_build() -> dict[str, str | None]:
    """Return torch's ``__version__`` (with its build) and ``cuda`` (None in a CPU build), without importing torch."""
    spec = importlib.util.find_spec("torch")
    found = runpy.run_path(str(Path(spec.origin).with_name("version.py"))) if spec and spec.origin else {}
    return {name: found.get(name) for name in ("__version__", "cuda")}


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
