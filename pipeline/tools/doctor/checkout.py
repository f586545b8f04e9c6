"""The work tree, git, and DVC's cache and remote."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pipeline.tools.doctor.findings import INSTALL, Finding
from pipeline.tools.doctor.probes import Answer
from pipeline.tools.doctor.resources import nearest

MOUNTS = Path("/proc/self/mountinfo")

DIRECTORIES = (".", ".dvc", ".dvc/tmp", ".dvc/cache", "data", "models", "reports", "results")
FILES = ("dvc.lock", "environment.json", "bench.json", "mlflow.db")
OWN = 'sudo chown -R "$(id -u):$(id -g)" . ; then run containers with --user "$(id -u):$(id -g)"'


def check_work_tree(root: Path, *, container: bool) -> Finding:
    shut = [name for name in DIRECTORIES if (root / name).is_dir() and not _writable(root / name)]
    shut += [name for name in FILES if (root / name).exists() and not os.access(root / name, os.W_OK)]
    place = root.resolve()
    if shut:
        found = f"user {os.getuid()} cannot write to {', '.join(shut)} in {place}"
        read_only = os.statvfs(root).f_flag & os.ST_RDONLY
        return Finding("work tree", "problem", found, "mount it without :ro" if read_only else OWN)
    if container and "overlay" in file_system(place):
        return Finding(
            "work tree",
            "warning",
            f"{place} lies in the container's own layer: what is made here is lost with the container",
            f'docker run -v "$PWD:{place}" ... from a checkout on the host',
        )
    return Finding("work tree", "ok", f"{place} can be written to")


def _writable(directory: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


def file_system(path: Path) -> str:
    """Its type, such as ext4, nfs4 or, of a container's own layer, overlay; empty where the system does not tell."""
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    found = ("", "")
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split()[4].replace("\\040", " ")
        if path.is_relative_to(point) and len(point) >= len(found[0]):
            found = (point, after.split()[0])
    return found[1]


def check_git(root: Path) -> Finding:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--verify", "--short", "HEAD"],
            env=os.environ | {"LC_ALL": "C"},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=5,
        )
    except FileNotFoundError:
        return Finding("git", "problem", "is not installed; DVC and gate need it", "apt-get install git")
    except subprocess.TimeoutExpired:
        return Finding("git", "problem", "no answer within 5 s", "see whether the file system of the checkout hangs")
    if done.returncode == 0:
        return Finding("git", "ok", f"at commit {done.stdout.strip()}")
    said = " ".join(done.stderr.split())
    if "dubious ownership" in said:
        return Finding(
            "git",
            "problem",
            f"refuses {root.resolve()}: it belongs to another user (dubious ownership)",
            f"git config --global --add safe.directory {root.resolve()}",
        )
    if "not a git repository" in said:
        remedy = "start from a clone; of a worktree (git worktree add), mount the main checkout too, at the same path"
        return Finding("git", "problem", f"{root.resolve()} is no git repository; DVC and gate need one", remedy)
    if "Needed a single revision" in said:
        return Finding("git", "warning", "no commit yet; results name the commit that made them", "git commit")
    return Finding("git", "problem", f"`git rev-parse HEAD` fails: {said}", "make git work here; DVC and gate need it")


def check_cache(root: Path, dvc: Answer) -> Finding:
    check = "DVC cache"
    if "cache" not in dvc.found:
        return _no_dvc(check, dvc)
    cache = Path(dvc.found["cache"])
    shown = os.path.relpath(cache, root.resolve()) if cache.is_relative_to(root.resolve()) else str(cache)
    there = nearest(cache)
    if not os.access(there, os.W_OK | os.X_OK):
        return Finding(check, "problem", f"user {os.getuid()} cannot write to {there}", OWN)
    if there.stat().st_dev != root.stat().st_dev:
        where = f"{shown} ({file_system(there) or 'unknown'}) is on another file system than the work tree"
        found = f"{where} ({file_system(root.resolve()) or 'unknown'}): every file is copied"
        if "overlay" in file_system(there):
            found += ", and the cache is lost with the container"
        remedy = "mount the checkout with its .dvc/cache as one volume, or dvc cache dir --local PATH_ON_THE_SAME_DISK"
        return Finding(check, "warning", found, remedy)
    types = dvc.found["types"]
    links = dvc.found.get("links")
    if links is None:
        return Finding(check, "ok", f"{shown} is not there yet; on the file system of the work tree")
    used = next((each for each in types if each in [*links, "copy"]), "copy")
    how = "files are copied: twice the space" if used == "copy" else f"files are {used}s: no copies"
    return Finding(check, "ok", f"{shown}, on the file system of the work tree; {how}")


def _no_dvc(check: str, dvc: Answer) -> Finding:
    if "NotDvcRepoError" in dvc.failure:
        return Finding(
            check,
            "problem",
            "this is no DVC repository",
            "cd to the top of the checkout; in a container, mount it there",
        )
    if dvc.late:
        remedy = "try again: a first import from a cold disk is slow, and so is a busy machine"
        return Finding(check, "warning", f"DVC is still being imported: {dvc.failure}", remedy)
    if "ModuleNotFoundError" in dvc.failure:
        return Finding(check, "problem", f"DVC is not installed: {dvc.failure}", INSTALL)
    remedy = "see `dvc doctor`, git above, .dvc/config and .dvc/config.local"
    return Finding(check, "problem", f"DVC cannot read its settings: {dvc.failure}", remedy)


def check_remote(dvc: Answer) -> Iterator[Finding]:
    check, found = "DVC remote", dvc.found
    if "remote" not in found:
        yield Finding(check, "not applicable", "unknown, see above")
        return
    name, url = found["remote"], found.get("url", "")
    if name is None:
        add = "dvc remote add --default storage s3://BUCKET/PATH (or a shared directory)"
        if found["remotes"]:
            add = f"dvc remote default {found['remotes'][0]}"
        yield Finding(check, "not applicable", "no default one: data and results stay on this machine", add)
        return
    place = f"{name} ({url})"
    if "plugins" in found:
        plugins = " ".join(found["plugins"])
        remedy = f"python -m pip install {plugins}; in a container, build it into the image"
        yield Finding(check, "problem", f"{place}: DVC needs {plugins} for it, which is not installed", remedy)
    elif "error" in found:
        remedy = f"check address and credentials: dvc remote modify --local {name} ...; dvc status --cloud says more"
        yield Finding(check, "problem", f"{place}: {found['error']}", remedy)
    elif "answers" not in found:
        remedy = "check address, network and proxy; dvc status --cloud --verbose says more"
        yield Finding(check, "problem", f"{place}: {dvc.failure}", remedy)
    elif not found.get("writable", True):
        remedy = f"give user {os.getuid()} the right to write there; in a container, mount it"
        yield Finding(check, "problem", f"{place} cannot be written to", remedy)
    else:
        empty = "" if found["exists"] else "; nothing is there yet (dvc push makes it)"
        yield Finding(check, "ok", f"{place} answers{empty}")
