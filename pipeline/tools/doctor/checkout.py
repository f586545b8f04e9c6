"""The checkout: params.yaml and its variants, the work tree, git, DVC's cache and remote, where runs are tracked."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from pipeline.tools.doctor.facts import Facts
from pipeline.tools.doctor.findings import INSTALL, Finding, not_applicable, ok, problem, still_imported, warning
from pipeline.tools.doctor.probes import Answer, nearest

DIRECTORIES = (".", ".dvc", ".dvc/tmp", ".dvc/cache", "data", "models", "reports", "results")
FILES = ("dvc.lock", "environment.json", "bench.json", "mlflow.db")
OWN = 'sudo chown -R "$(id -u):$(id -g)" . ; then run containers with --user "$(id -u):$(id -g)"'
GO_TO_THE_TOP = "cd to the top of the checkout; in a container, mount it there"


def params_file(facts: Facts) -> Finding:
    mistakes, config = facts.job.mistakes, facts.job.config
    if config:
        return ok(f"{len(config.variants)} variants: {', '.join(config.variants)}")
    correct = "correct params.yaml; params.schema.json lists all keys"
    return problem(mistakes, GO_TO_THE_TOP if "is missing" in mistakes else correct)


def variants(facts: Facts) -> Iterator[Finding]:
    job = facts.job
    for reason in dict.fromkeys(job.refused.values()):
        names = ", ".join(name for name, why in job.refused.items() if why == reason)
        yield problem(f"cannot run here: {names}: {reason}", "follow the message, or use a machine that has it")
    skipped = [(name, *each) for name, plan in job.plans.items() for each in plan.skipped.items()]
    remedies = {
        "bf16": "use a machine that has it, or set train.without_native: run",
        "GPU": "see to the NVIDIA driver, below, or set train.device: cpu",
    }
    for name, technique, reason in skipped:
        remedy = remedies.get(technique, "none needed if that is known: the report says so")
        if "train.batch_size" in reason:
            remedy = "set train.batch_size to a multiple of the number of GPUs"
        yield warning(f"{name}: {technique} is skipped: {reason}", remedy)
    if job.plans and not job.refused and not skipped:
        kinds = {"cuda": "GPU", "cpu": "CPU process"}
        placed = [f"{name} on {plan.processes} {kinds[plan.device]}(s)" for name, plan in job.plans.items()]
        yield ok(f"all run here as asked: {', '.join(placed)}")


def names(facts: Facts) -> Iterator[Finding]:
    """Whether the model, the loss and the metric are there; without params.yaml or torch, that is said already."""
    if facts.job.config and "version" in facts.torch.found:
        train, failure = facts.job.config.train, facts.names.failure
        if facts.names.late:
            yield still_imported(failure)
        elif failure:
            yield problem(failure, "correct params.yaml, or the module that it names")
        else:
            yield ok(f"{train.model}, with {train.loss} and {train.metric}")


def work_tree(facts: Facts) -> Finding:
    root, place = facts.root, facts.root.resolve()
    shut = [name for name in DIRECTORIES if (root / name).is_dir() and not _writable(root / name)]
    shut += [name for name in FILES if (root / name).exists() and not os.access(root / name, os.W_OK)]
    if shut:
        read_only = os.statvfs(root).f_flag & os.ST_RDONLY
        found = f"user {os.getuid()} cannot write to {', '.join(shut)} in {place}"
        return problem(found, "mount it without :ro" if read_only else OWN)
    if facts.container and file_system(place) == "overlay":
        found = f"{place} lies in the container's own layer: what is made here is lost with the container"
        return warning(found, f'docker run -v "$PWD:{place}" ... from a checkout on the host')
    return ok(f"{place} can be written to")


def _writable(directory: Path) -> bool:
    with suppress(OSError), tempfile.TemporaryFile(dir=directory):
        return True
    return False


def file_system(path: Path) -> str:
    """Its type, such as ext4, nfs4 or, of a container's own layer, overlay."""
    types = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    return next((types[each] for each in (path, *path.parents) if each in types), "unknown")


def git(facts: Facts) -> Finding:
    place = facts.root.resolve()
    command = ["git", "-C", str(place), "rev-parse", "--verify", "--short", "HEAD"]
    try:
        done = subprocess.run(command, env=os.environ | {"LC_ALL": "C"}, capture_output=True, timeout=5)
    except FileNotFoundError:
        return problem("is not installed; DVC and gate need it", "apt-get install git")
    except subprocess.TimeoutExpired:
        return problem("no answer within 5 s", "see whether the file system of the checkout hangs")
    said = " ".join((done.stdout or done.stderr).decode(errors="replace").split())
    if done.returncode == 0:
        return ok(f"at commit {said}")
    if "Needed a single revision" in said:
        return warning("no commit yet; results name the commit that made them", "git commit")
    remedy = "make git work here; DVC and gate need it"
    if "dubious ownership" in said:
        remedy = f"git config --global --add safe.directory {place}"
    elif "not a git repository" in said:
        remedy = "start from a clone; of a worktree (git worktree add), mount the main checkout too, at the same path"
    return problem(f"does not work in {place}; DVC and gate need it: {said}", remedy)


def cache(facts: Facts) -> Finding:
    dvc, root = facts.dvc, facts.root.resolve()
    if "cache" not in dvc.found:
        return _no_dvc(dvc)
    cache, link = Path(dvc.found["cache"]), dvc.found.get("link")
    shown = cache.relative_to(root) if cache.is_relative_to(root) else cache
    there = nearest(cache)
    if not os.access(there, os.W_OK | os.X_OK):
        return problem(f"user {os.getuid()} cannot write to {there}", OWN)
    if there.stat().st_dev != root.stat().st_dev:
        where = f"{shown} ({file_system(there)}) is on another file system than the work tree ({file_system(root)})"
        lost = ", and the cache is lost with the container" if file_system(there) == "overlay" else ""
        remedy = "mount the checkout with its .dvc/cache as one volume, or dvc cache dir --local PATH_ON_THE_SAME_DISK"
        return warning(f"{where}: every file is copied{lost}", remedy)
    how = "files are copied: twice the space" if link == "copy" else f"files are {link}s: no copies"
    return ok(f"{shown}, on the file system of the work tree; {how if link else 'it is not there yet'}")


def _no_dvc(dvc: Answer) -> Finding:
    if dvc.late:
        return still_imported(dvc.failure)
    if "NotDvcRepoError" in dvc.failure:
        return problem("this is no DVC repository", GO_TO_THE_TOP)
    if "ModuleNotFoundError" in dvc.failure:
        return problem(f"DVC is not installed: {dvc.failure}", INSTALL)
    remedy = "see `dvc doctor`, git above, .dvc/config and .dvc/config.local"
    return problem(f"DVC cannot read its settings: {dvc.failure}", remedy)


def remote(facts: Facts) -> Finding:
    found, failure = facts.dvc.found, facts.dvc.failure
    if "remote" not in found:
        return not_applicable("unknown, see above")
    name, url, others = found["remote"], found["url"], found["remotes"]
    if name is None:
        add = "dvc remote add --default storage s3://BUCKET/PATH (or a shared directory)"
        choose = f"dvc remote default {others[0]}" if others else add
        return not_applicable("no default one: data and results stay on this machine", choose)
    if "exists" not in found:
        remedy = f"check address, credentials (dvc remote modify --local {name} ...), network and proxy"
        if plugin := re.search(r"requires '([\w-]+)' to be installed", failure):
            remedy = f"python -m pip install {plugin[1]}; in a container, build it into the image"
        return problem(f"{name} ({url}): {failure}", f"{remedy}; dvc status --cloud --verbose says more")
    if not found.get("writable", True):
        remedy = f"give user {os.getuid()} the right to write there; in a container, mount it"
        return problem(f"{name} ({url}) cannot be written to", remedy)
    empty = "" if found["exists"] else "; nothing is there yet (dvc push makes it)"
    return ok(f"{name} ({url}) answers{empty}")


def tracking(facts: Facts) -> Finding:
    store = facts.store
    if store.late:
        return problem(f"MLFLOW_TRACKING_URI: {store.failure}", "check the address and the name server")
    if "well" not in store.found:
        raise RuntimeError(store.failure)
    said = {True: ok, False: problem, None: not_applicable}[store.found["well"]]
    return said(store.found["found"], store.found["remedy"])
