"""The environment's fingerprint: everything besides code, parameters and data that a measured number depends on.

Two machines with the same hardware, software and settings must have the same fingerprint. Therefore the fingerprint
holds no time, host name, serial number or UUID. It also leaves out the kernel's release, because otherwise every
security update would invalidate all results.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Literal

from pipeline import hosts
from pipeline.environment import hardware, software
from pipeline.environment.hardware import cores
from pipeline.environment.hardware import memory_limits as memory_limits
from pipeline.errors import PipelineError, redacted
from pipeline.files import differing, json_sha256, read_json, read_text, write_text
from pipeline.params import CATALOGUE, COMPILER, Launch, Machine

ENVIRONMENT_FILE = Path("environment.json")

_AMPERE, _ADA = (8, 0), (8, 9)
"""Compute capabilities of the first GPUs with native bf16 and TF32, and with float8."""

ReliedOn = Mapping[str, Mapping[str, AbstractSet[str]]]
"""The return value of ``plans.relied_on``: section -> user (a variant, or a form of inference) -> names of
packages, or ``COMPILER``."""


def fingerprint(relied_on: ReliedOn | None = None, links: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return ``{"hash", "hardware", "software", "settings", "relied_on"}``; the hash (SHA-256, hexadecimal) covers
    hardware, software and settings, which every number depends on.

    Sizes are in whole GiB, power limits in watts. ``None`` means an unknown value; for a setting, it means that the
    value may be a secret (``variables``). The argument ``relied_on`` (``plans.relied_on``) names the optional packages
    that each variant and form uses. The hash does not cover the versions of optional packages, because most numbers do
    not depend on these versions. ``links``: the link of each host (``hosts.links``); empty with one host. Call this in
    the process that a person started, because launchers set variables such as OMP_NUM_THREADS in their workers.
    """
    shown, driver, _ = hardware.visible_gpus()
    cpu = hardware.cpu_facts()
    flags = hardware.cpu_flags(cpu)
    content: dict[str, Any] = {
        "hardware": {
            "cpu": {
                "model": hardware.cpu_model(cpu),
                "cores": cores(),
                "flags": [flag for flag in hardware.KERNEL_FLAGS if flag in flags],
            },
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
            "gpus": shown,
        },
        "software": {
            "system": f"{platform.system()} {platform.machine()}",
            "image": redacted(os.environ.get("PIPELINE_IMAGE", "")) or None,  # a container image sets it
            "python": f"{sys.version_info.major}.{sys.version_info.minor}",
            "numpy": software.version("numpy"),
            "torch": software.torch_build()["__version__"],
            "torchvision": software.version("torchvision"),
        },
        "settings": software.variables(),
    }
    if links:  # the hosts are alike in all else
        content["hardware"]["hosts"] = links
    if shown:  # without a GPU, these libraries are not used even if they are installed
        content["software"] |= {"driver": driver, "cuda": software.torch_build()["cuda"], **software.cuda_libraries()}
    version = functools.cache(software.version_of_optional)
    of_users = {
        section: {user: {name: version(name) for name in sorted(names)} for user, names in users.items()}
        for section, users in (relied_on or {}).items()
    }
    return {"hash": json_sha256(content), **content, "relied_on": of_users}


def hash_of(content: Mapping[str, Any], section: Literal["variants", "forms"], *users: str) -> str:
    """Return a hash of everything in the environment that the numbers of ``users`` depend on. If the users need no
    optional package, the result is the fingerprint's hash.

    ``content`` is a fingerprint. The hash stored in it is ignored; a new hash is computed.
    """
    known = _optional_versions(content, section)
    versions = {name: version for user in users for name, version in known.get(user, {}).items()}
    own = json_sha256({name: content.get(name) for name in ("hardware", "software", "settings")})
    return json_sha256([own, versions]) if versions else own


def _optional_versions(
    content: Mapping[str, Any], section: Literal["variants", "forms"]
) -> Mapping[str, Mapping[str, str | None]]:
    """Return the optional packages of a section of a fingerprint: user -> name -> version. The result is empty if an
    older version of the pipeline wrote the fingerprint."""
    versions: Mapping[str, Mapping[str, str | None]] = content.get("relied_on", {}).get(section, {})
    return versions


def without_stages(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return environment.json's content without stages, forms and plans. What remains is the environment that the
    variants' numbers depend on."""
    left_out = {"stages", "variants", "digests", "teachers", "rulers", "script"}
    kept = {key: value for key, value in content.items() if key not in left_out}
    return kept | {"relied_on": {"variants": dict(_optional_versions(content, "variants"))}}


def write(content: Mapping[str, Any], path: Path = ENVIRONMENT_FILE) -> str:
    """Write a fingerprint, perhaps with further values (``stages.described``), to ``path``; return its hash. A file
    with the same content is not rewritten."""
    text = json.dumps(content, indent=2) + "\n"
    if not path.exists() or read_text(path) != text:
        write_text(path, text)
    return str(content["hash"])


def read(path: Path = ENVIRONMENT_FILE) -> dict[str, Any]:
    """Read the fingerprint that ``write`` wrote to ``path``. Raises PipelineError if the file is missing or invalid."""
    again = "run `dvc repro`, or `python -m pipeline environment`."
    try:
        content = read_json(path)
    except FileNotFoundError:
        raise PipelineError(f"{path} is missing, so the machine of the results is unknown: {again}") from None
    except ValueError:
        content = None
    if not isinstance(content, dict) or not isinstance(content.get("hash"), str):
        raise PipelineError(f"{path} does not contain an environment's fingerprint: {again}")
    return content


def last_written() -> dict[str, Any]:
    """Return the content of environment.json; empty if the file is missing or invalid."""
    try:
        return read()
    except PipelineError:
        return {}


def changed_since(before: Mapping[str, Any]) -> list[str]:
    """Return what differs between ``before``, an earlier content of environment.json, and the file: dotted paths, such
    as "variants.memory.code.pipeline/techniques/channels_last.py". Empty if ``before`` is empty."""
    made_of_others = {"hash", "digests"}
    then, now = ({key: content[key] for key in content.keys() - made_of_others} for content in (before, read()))
    return sorted(path for path, *_ in differing(then, now)) if before else []


def checked_out() -> str | None:
    """Return the checked-out commit, followed by "+" if files differ from it; None if git or a commit is missing.

    Files that ``dvc repro`` and ``make again`` write are ignored: dvc.lock, and the tracked reports and sessions.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(("git", *arguments), capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git(
            "status", "--porcelain", "--", ".", *(f":(exclude){name}" for name in ("dvc.lock", "reports", "sessions"))
        )
        return git("rev-parse", "--verify", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def machine(launch: Launch | None = None) -> Machine:
    """Describe this machine's hardware and software, for the planning of variants.

    With ``launch``, the machine has all hosts that ``launch`` names, and processes that are started later are divided
    among them. All hosts have the same hardware and software, or ``hosts.others`` refuses them.
    """
    from pipeline.environment import stages  # imported here, because it imports this module

    shown, _, why_none = hardware.visible_gpus()
    least = min((tuple(map(int, gpu["compute_capability"].split("."))) for gpu in shown), default=(0, 0))
    extras = {name for technique in CATALOGUE for name in technique.relies_on} - {COMPILER}
    return Machine(
        hosts=hosts.use(launch, stages.record) if launch else 1,
        gpus=len(shown),
        why_no_gpu=why_none,
        gpu_native_bf16=least >= _AMPERE,
        cpu_native_bf16=bool(hardware.cpu_flags(hardware.cpu_facts()) & hardware.NATIVE_BF16_FLAGS),
        gpu_tf32=least >= _AMPERE,
        gpu_float8=least >= _ADA,
        trims_memory=hasattr(ctypes.CDLL(None), "malloc_trim"),
        installed=frozenset(name for name in extras if importlib.util.find_spec(name)),
        no_cpu_kernels=software.no_kernels(software.cpu_compiler()),
        no_gpu_kernels=software.no_kernels(software.gpu_compiler(), "triton"),
    )
