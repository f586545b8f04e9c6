"""Looks that are slow, may hang or may crash, each in a process of its own.

``python -m pipeline.tools.doctor.probes NAME`` prints what it finds, a JSON object a line, as soon as it knows it. So
what was found before a hang is not lost.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import redacted

NETWORK_SECONDS = 3.0
"""Longest wait for a DVC remote."""


class Answer(NamedTuple):
    found: dict[str, Any]
    failure: str = ""
    """Why it is not complete."""
    late: bool = False
    """It was cut off."""


def ask(name: str, seconds: float) -> Answer:
    """Run the probe ``name`` and give it ``seconds``."""
    package = str(Path(__file__).parents[3])
    paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    failure, late = "", False
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, name],
            env=os.environ | {"PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
        )
        out = done.stdout
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines()
            failure = said[-1] if said else f"the process ended with {done.returncode}"
    except subprocess.TimeoutExpired as error:
        out, failure, late = error.stdout or b"", f"no answer within {seconds:g} s", True
    found: dict[str, Any] = {}
    for line in out.decode(errors="replace").splitlines():
        if line.startswith("{"):  # libraries may print what they like
            found |= json.loads(line)
    return Answer(found, failure, late)


def _say(**found: Any) -> None:
    print(json.dumps(found), flush=True)


def _torch() -> None:
    """version, cuda (None in a CPU build), nccl (None without), gpus (how many), errors (why they do not compute)."""
    import torch

    nccl = None
    if hasattr(torch._C, "_nccl_version"):
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    _say(version=torch.__version__, cuda=torch.version.cuda, nccl=nccl)
    if torch.version.cuda is None:
        return
    errors: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what raises below
        count = torch.cuda.device_count()
        try:
            torch.cuda.init()
            for index in range(count):
                torch.ones(1, device=f"cuda:{index}").add_(1).item()
        except Exception as error:  # RuntimeError, AssertionError and torch's own
            errors.append(_line(error))
    _say(gpus=count, errors=errors)


def _names() -> None:
    """error: why the model, the loss or the metric of params.yaml cannot be found; None if they can."""
    from pipeline import errors, models, params
    from pipeline.models import loss_and_metric

    train = params.load().train
    try:
        models.load(train.model)
        loss_and_metric.load(train)
    except errors.PipelineError as error:
        _say(error=str(error))
    else:
        _say(error=None)


def _dvc() -> None:
    """root, cache and its link types, then the default remote, each as DVC itself reads its settings."""
    from dvc.repo import Repo
    from dvc_objects.fs import generic
    from dvc_objects.fs.errors import RemoteMissingDepsError

    with Repo() as repo:
        odb = repo.cache.local
        _say(root=repo.root_dir, cache=odb.path, types=list(odb.cache_types))
        if Path(odb.path).is_dir():
            beside = repo.fs.join(repo.root_dir, "x")
            _say(links=[*generic.test_links(["reflink", "hardlink", "symlink"], odb.fs, odb.path, repo.fs, beside)])
        name = repo.config["core"].get("remote")
        if not name:
            _say(remote=None, remotes=sorted(repo.config["remote"]))
            return
        _say(remote=name, url=redacted(repo.config["remote"].get(name, {}).get("url", "")))

        def give_up() -> None:
            _say(error=f"no answer within {NETWORK_SECONDS:g} s")
            os._exit(0)  # nothing else ends a library that tries again and again

        patience = threading.Timer(NETWORK_SECONDS, give_up)
        patience.daemon = True
        try:
            remote = repo.cloud.get_remote()
            system, path = remote.fs, remote.path
            assert system.fs  # imports and opens what speaks to the remote, which it has not done yet
            patience.start()
            if system.protocol == "local":
                parents = [path, *system.parents(path)]
                nearest = next(each for each in parents if system.exists(each))
                _say(answers=True, exists=nearest == path, writable=os.access(nearest, os.W_OK))
            elif system.protocol in ("http", "https"):
                _say(answers=True, exists=system.fs.exists(path, strict=True))  # else it takes any failure for absence
            else:
                bucket = path.split("/")[0]
                if bucket:
                    system.fs.info(bucket)  # raises: exists() takes any failure for absence
                _say(answers=True, exists=system.exists(path))
        except FileNotFoundError:
            _say(error="what the address names is not there")
        except RemoteMissingDepsError as error:
            _say(plugins=error.missing_deps)
        except Exception as error:
            wanted = re.search(r"requires '([\w-]+)'", str(error)) if isinstance(error, ImportError) else None
            _say(**{"plugins": [wanted[1]]} if wanted else {"error": _line(error)})
        finally:
            patience.cancel()


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return redacted(f"{type(error).__name__}: {text}" if text else type(error).__name__)


if __name__ == "__main__":
    {"torch": _torch, "names": _names, "dvc": _dvc}[sys.argv[1]]()
