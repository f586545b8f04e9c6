"""The command ``doctor``: find what this machine or container lacks for the job of params.yaml, and how to fix it.

A check yields findings; ``CHECKS`` lists all checks. ``doctor`` works even if much is broken: an error in a check
becomes a finding. ``doctor`` stops a check in ``APART`` that hangs. The command changes nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from pipeline import environment, hosts, params, plans
from pipeline.environment import hardware
from pipeline.errors import ConfigError, PipelineError, count, hanging, printable, redacted, said, say
from pipeline.files import PREPARED

SECONDS = 60.0
"""Longest time that a check in a process of its own may take. Importing torch, DVC or MLflow takes one to three
seconds, and much longer from a cold disk or on a busy machine."""
PCI = Path("/sys/bus/pci/devices")
"""Directory of the PCI devices, which containers see too. Vendor 0x10de is NVIDIA; classes that begin with 0x03 are
display controllers, which include GPUs."""
SHARED_MEMORY = Path("/dev/shm")
OURS = (".", ".dvc", "data", "models", "reports", "results", "dvc.lock", "environment.json", "bench.json", "mlflow.db")

GIB = 2**30
SHARED_MEMORY_BYTES = GIB
"""NVIDIA's recommendation for NCCL in containers (--shm-size=1g)."""
PROCESS_BYTES = 2 * GIB
"""Memory that a training process may need: torch takes most of the first GiB, model and data take the rest."""
DISK_BYTES = 5 * GIB
"""Free space that data, models and DVC's copies of both need for a small job, with a reserve."""

USE_CPU = "or set train.device: cpu"
DRIVER = (
    "install driver 580 or newer on the host; in a container: docker run --gpus all ... (the host needs the NVIDIA "
    f"Container Toolkit); {USE_CPU}"
)
"""Driver 580 runs every minor version of CUDA 13, and all older versions of CUDA (NVIDIA's table of minor version
compatibility)."""
TO_THE_TOP = (
    "cd to the folder of params.yaml; in a container, mount this folder at the working directory; in a repository of "
    "your own, python -m pipeline init writes params.yaml and .dvc"
)
MODULES = (
    "make repro, which installs requirements.lock into .venv; in a container, rebuild the image; if you installed the "
    "package into an environment of your own, install the module there"
)
REMEDIES = {
    "params.yaml is missing": TO_THE_TOP,
    "NotDvcRepoError": TO_THE_TOP,
    "not a git repository": "git init, or start from a clone; a worktree also needs its main checkout, mounted at the "
    "same path",
    "dubious ownership": 'git config --global --add safe.directory "$PWD"',
    "ImportError": MODULES,
    "ModuleNotFoundError": MODULES,
    "no answer": "try again: a first import or a busy machine is slow; if the check fails again, a device, a server "
    "or a file system may hang",
    "ersion mismatch": "reboot the host: the driver was updated while the old driver was loaded",
    "no kernel image": "install a torch that is built for this GPU's compute capability",
    "params.yaml:": "correct params.yaml (params.schema.json lists all keys), or use a machine that can run the job",
    "model, data:": "correct params.yaml, or your module that the message names",
    "GPUs:": f"run nvidia-smi and `dmesg | grep -i nvrm` on the host: a GPU that hangs needs a reset; {DRIVER}",
    "hosts:": "correct launch in params.yaml: docs/several-hosts.md shows what a host needs",
    "git:": "install or repair git: DVC and the gate need it",
    "DVC:": "see `dvc doctor`, the finding about git, .dvc/config and .dvc/config.local",
    "tracking:": "check the address in MLFLOW_TRACKING_URI, and the name server",
}
"""Part of the text of a problem or warning -> the remedy to print if the check names none. The text can be another
tool's error message. The first entry that occurs in "check: text" counts."""


class Finding(NamedTuple):
    status: str
    """PROBLEM: something that params.yaml or the environment asks for does not work here. warning: the job works, but
    worse than it could, or not as expected. "-": this job does not need the checked part here, or it was not checked.
    ok: none of these."""
    fact: str
    remedy: str = ""


ok, not_applicable = partial(Finding, "ok"), partial(Finding, "-")
warning, problem = partial(Finding, "warning"), partial(Finding, "PROBLEM")


def enough(holds: bool, fact: str, wants: str, remedy: str, *, needed: bool = False) -> Finding:
    return ok(fact) if holds else (problem if needed else warning)(f"{fact}; {wants}", remedy)


def params_file() -> Iterator[Finding]:
    config = params.load()
    made = plans.plans(config, environment.machine(config.launch))
    kinds = {"cuda": "GPU", "cpu": "CPU process"}
    placed = [f"{name} on {count(plan.processes, kinds[plan.device])}" for name, plan in made.items()]
    yield ok(f"all variants run here: {', '.join(placed)}")
    for name, plan in made.items():
        for technique, reason in plan.skipped.items():
            yield warning(
                f"{name}: {technique} is skipped: {reason}",
                "do nothing if this is expected: the report names what was skipped",
            )


def parts() -> Iterator[Finding]:
    """Try to make the model, the loss, the metric and the task of the job, as training makes them."""
    config = _config()
    if config is None:
        return
    if config.script:
        program = config.command_of(config.compare.baseline).words[0]
        exists = shutil.which(program) is not None
        yield enough(exists, f"script.command: {program}", "it is not found", "correct script.command", needed=True)
        return
    from pipeline import models, tasks
    from pipeline.data import prepared
    from pipeline.models import loss_and_metric, optimizers
    from pipeline.tools import building

    models.load(config.train.model)
    tasks.find(config.train.task)
    loss_and_metric.load(config.train)
    dataset = prepared.read(PREPARED) if (PREPARED / prepared.DESCRIPTION).exists() else None
    if dataset is not None and dataset.name.split()[0] == config.fetch.dataset:
        prepared.check_batch(config.train.batch_size, dataset.name, len(dataset.train))
        data, remedy = dataset.name, ""
    elif dataset := building.imitation(config):
        data, remedy = f"samples like those of {dataset.name}, which are not prepared", "dvc repro prepare"
    else:
        yield not_applicable(
            f"{config.train.model} exists; to build it, the data must be prepared", "dvc repro prepare"
        )
        return
    task = tasks.of_job(config.train, dataset)
    task.check()
    model = task.begun()
    task.try_step(model)
    optimizers.check_patterns(config.train, dict(model.named_parameters()), "no_decay", "lr_factors")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    of_these = f", of which {trained:,} train," if trained < parameters else ""
    yield ok(f"{config.train.model} has {parameters:,} parameters{of_these} on {data}", remedy)
    ran: list[list[Any]] = []  # of each part that runs, in this order, its own parameters
    for part in model.modules():
        if own := [*part.parameters(recurse=False)]:
            part.register_forward_pre_hook(lambda *_, own=own: ran.append(own))
    model(task.inputs(2))
    frozen = {*chain(*takewhile(lambda own: not any(weight.requires_grad for weight in own), ran))}
    if 2 * sum(weight.numel() for weight in frozen) > parameters and config.train.augment == params.Augment():
        yield ok(
            "most parameters are frozen and belong to the parts that run first, so what these parts return could be "
            "computed once and stored as the data set, which is beyond what the techniques do"
        )
    for plan in _plans():
        try:
            building.check_variant(plan, dataset)
        except PipelineError as error:
            yield problem(str(error))


def gpu() -> Iterator[Finding]:
    import torch

    config, build, hidden = _config(), torch.version.cuda, os.environ.get("CUDA_VISIBLE_DEVICES")
    device = config.train.device if config else "auto"
    yield ok(f"PyTorch {torch.__version__}, for {f'CUDA {build}' if build else 'CPUs'}")
    if device == "cpu":
        return
    shown, version, failure = hardware.visible_gpus()
    devices = [[(device / name).read_text() for name in ("vendor", "class")] for device in PCI.glob("*")]
    present = any(vendor.startswith("0x10de") and kind.startswith("0x03") for vendor, kind in devices)
    fault = problem if device == "cuda" else warning
    if failure:
        yield problem(failure)
    elif shown:
        torch.cuda.init()
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        for index in range(len(names)):
            torch.ones(1, device=f"cuda:{index}").add_(1).item()
        fact = f"torch computes on {len(names)} x {', '.join(dict.fromkeys(names))}; the driver is {version}"
        same = len(names) == len(shown)
        yield ok(fact) if same else problem(f"{fact}, and shows {count(len(shown), 'GPU')}")
    elif build is None and (present or device == "cuda"):
        yield fault("this build of torch cannot use GPUs", f"install a CUDA build of torch, {USE_CPU}")
    elif hidden is not None and present:
        yield fault(f"CUDA_VISIBLE_DEVICES={hidden!r} hides all GPUs", "unset CUDA_VISIBLE_DEVICES")
    elif present:
        split = "if nvidia-smi shows a GPU that is split (MIG): nvidia-smi -mig 0 ends the split"
        yield problem("there is an NVIDIA GPU, but CUDA shows none", f"{DRIVER}; {split}")
    elif device == "cuda":
        yield problem("train.device is cuda, but there is no NVIDIA GPU", DRIVER)
    else:
        yield not_applicable("no NVIDIA GPU here: the job runs on the CPU")


def cpu() -> Iterator[Finding]:
    cores, present, processes = environment.cores(), os.cpu_count() or 1, _processes()
    wants = f"{processes} processes that train together would wait for each other"
    remedy = f"give the container more CPUs (--cpus {processes}), or lower processes in params.yaml"
    yield enough(cores >= processes, f"{cores:g} of {present} cores", wants, remedy)
    busy = psutil.getloadavg()[0]
    fact = f"{busy:.1f} threads used or awaited the {count(present, 'core')} in the last minute"
    wants = "other programs may take the cores from the bench, which then rejects its samples"
    yield enough(busy <= present / 2, fact, wants, "end other programs before the bench (`top` lists them)")


def memory() -> Iterator[Finding]:
    processes = _processes()
    room, need = min([psutil.virtual_memory().available, *environment.memory_limits()]), PROCESS_BYTES * processes
    wants = f"{count(processes, 'training process')} may need {_size(need)}"
    remedy = (
        f"end other programs, or lower processes in params.yaml; in a container: docker run --memory {need // GIB}g"
    )
    yield enough(room >= need, f"{_size(room)} free", wants, remedy)


def shared_memory() -> Iterator[Finding]:
    if not SHARED_MEMORY.exists():
        yield not_applicable(f"this system has no {SHARED_MEMORY}")
        return
    usage = shutil.disk_usage(SHARED_MEMORY)
    fact = f"{SHARED_MEMORY}: {_size(usage.free)} of {_size(usage.total)} free"
    wants = f"NCCL between GPUs, and a data loader's workers, need {_size(SHARED_MEMORY_BYTES)}"
    remedy = "docker run --shm-size=1g, or --ipc=host; on a host: mount -o remount,size=1g /dev/shm; to remove files "
    remedy += f"of ended jobs: rm {SHARED_MEMORY}/nccl-* {SHARED_MEMORY}/torch_*"
    needed = any(
        (plan.device == "cuda" and plan.processes > 1) or plan.applied.data_loading == "dataloader" for plan in _plans()
    )
    yield enough(usage.free >= SHARED_MEMORY_BYTES, fact, wants, remedy, needed=needed)


def other_hosts() -> Iterator[Finding]:
    config = _config()
    if config is None or environment.machine(config.launch).hosts == 1:
        idle = hosts.idle_nodes()
        remedy = "start the command by sbatch, or list the nodes in launch.hosts, this one first"
        yield warning(idle, remedy) if idle else not_applicable("processes run on this host alone")
        return
    kinds = dict.fromkeys(str(link["link"] or "unknown") for link in hosts.links())
    names = f"{', '.join(hosts.names())} have the same settings, code, data, hardware and software"
    yield ok(f"{names}; the link is {', '.join(kinds)}")


def work_tree() -> Iterator[Finding]:
    folder = Path.cwd()
    if shut := [name for name in OURS if Path(name).exists() and not os.access(name, os.W_OK)]:
        remedy = 'sudo chown -R "$(id -u):$(id -g)" . ; run containers with --user "$(id -u):$(id -g)" and without :ro'
        yield problem(f"user {os.getuid()} cannot write to {', '.join(shut)} in {folder}", remedy)
    free = shutil.disk_usage(folder).free
    wants = f"data, models and DVC's copies of both may need {_size(DISK_BYTES)}"
    remedy = (
        "free space: dvc gc --workspace removes cached data of other versions; docker system prune removes stopped "
        "containers, unused networks, dangling images and unused build cache"
    )
    yield enough(free >= DISK_BYTES, f"{_size(free)} free for {folder}", wants, remedy, needed=free < GIB)


def git() -> Iterator[Finding]:
    command, plain = ["git", "rev-parse", "--verify", "--short", "HEAD"], os.environ | {"LC_ALL": "C"}
    done = subprocess.run(command, env=plain, capture_output=True, text=True, errors="replace")
    if "Needed a single revision" in done.stderr:
        yield warning("there is no commit yet, but results name the commit of their code", "git commit")
    elif done.returncode:
        yield problem(" ".join(done.stderr.split()))
    else:
        yield ok(f"at commit {done.stdout.strip()}")


def dvc() -> Iterator[Finding]:
    from dvc.repo import Repo

    with Repo() as repo:
        yield ok(f"the cache is {repo.cache.local.path}")
        name = repo.config["core"].get("remote")
        if name:
            yield ok(f"the default remote is {name} ({repo.config['remote'][name]['url']})")
        else:
            add = "dvc remote add --default storage s3://BUCKET/PATH (or a shared directory)"
            yield not_applicable("there is no default remote: data and results stay on this machine", add)


def tracking() -> Iterator[Finding]:
    from pipeline.tracking import health

    config = _config()
    well, fact, remedy = health(Path(), (config.publish if config else params.Publish()).experiment)
    yield Finding({True: "ok", False: "PROBLEM", None: "-"}[well], fact, remedy)


def _config() -> params.Config | None:
    with suppress(ConfigError):  # the check of params.yaml reports the error
        return params.load()
    return None


def _processes() -> int:
    """Return the largest number of processes of a variant on a host; 1 if the variants cannot be planned."""
    return max((plan.processes // plan.hosts for plan in _plans()), default=1)


def _plans() -> list[plans.Plan]:
    with suppress(Exception):  # the check of params.yaml reports the error
        config = params.load()
        return [*plans.plans(config, environment.machine(config.launch)).values()]
    return []


def _size(amount: int) -> str:
    return f"{amount / GIB:.1f} GiB" if amount >= GIB else f"{amount / 2**20:.0f} MiB"


CHECKS: dict[str, Callable[[], Iterator[Finding]]] = {
    "params.yaml": params_file,
    "model, data": parts,
    "GPUs": gpu,
    "CPU": cpu,
    "memory": memory,
    "shared memory": shared_memory,
    "hosts": other_hosts,
    "work tree": work_tree,
    "git": git,
    "DVC": dvc,
    "tracking": tracking,
}
"""All checks, in the order in which a person would fix faults."""
APART = ("model, data", "GPUs", "DVC", "tracking")
"""Checks that run in processes of their own, because what they examine is slow, or may hang or crash."""


def run() -> int:
    """Run all checks and print their findings, without secrets; return 1 if a finding is a problem, else 0."""
    with ThreadPoolExecutor(2) as pool:  # more threads would delay all checks on a small machine
        made = pool.map(lambda check: [*(_apart if check in APART else _findings_of)(check)], CHECKS)
        by_check = dict(zip(CHECKS, made, strict=True))
    column = max(map(len, CHECKS))
    for name, findings in by_check.items():
        for status, text, remedy in findings:
            say(hanging(f"{status:7}  {name:{column}}  ", printable(redacted(text))))
            if status in ("PROBLEM", "warning") and not remedy:
                remedy = next((known for part, known in REMEDIES.items() if part in f"{name}: {text}"), "")
            if remedy:  # indented less than the text, so that commands stay on one line
                say(hanging("         -> ", printable(redacted(remedy))))
    counts = Counter(finding.status for findings in by_check.values() for finding in findings)
    say(f"\n{count(counts['PROBLEM'], 'problem')}, {count(counts['warning'], 'warning')}")
    return int(counts["PROBLEM"] > 0)


def _findings_of(check: str) -> Iterator[Finding]:
    """Yield the findings of the check. An error in the check is a finding, too."""
    try:
        yield from CHECKS[check]()
    except Exception as error:
        yield problem(said(error) or f"{type(error).__name__}: {' '.join(str(error).split())}")


def _apart(check: str) -> Iterator[Finding]:
    """Yield what ``_findings_of`` yields in another process, which finds the same modules as this process. If that
    process hangs or crashes, yield its earlier findings and a finding about the failure."""
    command, same = [sys.executable, "-m", __name__, check], os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    failure = None
    try:
        done = subprocess.run(command, env=same, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS)
        output = done.stdout
        if done.returncode:
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            failure = problem([f"the process ended with {done.returncode}", *lines][-1])
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        failure = warning(f"no answer within {SECONDS:g} s")  # the check may just be slow
    yield from (Finding(*json.loads(line)) for line in output.splitlines())
    if failure:
        yield failure


if __name__ == "__main__":
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a user's module may print; stdout is for the findings
    for finding in _findings_of(sys.argv[1]):
        print(json.dumps(finding), file=answers, flush=True)
