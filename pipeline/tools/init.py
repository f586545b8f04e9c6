"""The command ``init``: write stages, settings and the GPU workflow into the user's repository.

The files come from the project itself (``PROJECT``), not from templates. ``RECORD`` holds the digest of each file as
``init`` last offered it. So a later version recognises files that the user changed, and leaves them as they are.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pipeline import files, params
from pipeline.errors import ConfigError, PipelineError, say
from pipeline.params import PARAMS_FILE, Machine
from pipeline.tools.choices import PROJECT
from pipeline.tools.first_params import params_of

RECORD = Path(".dvc/init.json")
"""JSON: file -> SHA-256 of the content that ``init`` last offered."""
WHOLE = (
    "dvc.yaml",
    ".dvc/plots/intervals.json",
    ".dvc/plots/variants.json",
    "inference/README.md",
    "profiles/README.md",
    "sessions/README.md",
    ".ci/gpu",
    "Dockerfile",
    ".dockerignore",
    "requirements-build.lock",
)
MINIMAL = ("dvc.yaml",)
"""The files of ``WHOLE`` without which no stage runs."""
AT_THE_TOP = (".github/report.py", ".github/session", ".github/workflows/gpu.yml")
"""Files for the top of the git repository, where GitHub expects the workflow, even if the other files are in a
folder."""
ONCE = (".dvc/config", ".dvc/.gitignore")
"""Files that are written only if they do not exist."""
LINES = {".dvcignore": "", ".gitignore": "# What `dvc repro` makes"}
"""File -> the text with which the needed part of the shipped file begins. ``init`` adds each line of this part that the
user's file lacks."""
IN_A_FOLDER = (
    ('REVISION="$GITHUB_SHA" .', 'REVISION="$GITHUB_SHA" {}'),
    ('"$CONTAINER" .ci/gpu', '"$CONTAINER" {}/.ci/gpu'),
    ("${{ runner.temp }}/copy/", "${{ runner.temp }}/copy/{}/"),
    ("run: .github/session", 'run: cd {} && "$GITHUB_WORKSPACE/.github/session"'),
)
"""Replacements (old, new) in the GPU workflow if the pipeline is in a folder; {} stands for this folder."""


def run(
    machine: Machine,
    *,
    model: str | None = None,
    configuration: str | None = None,
    yes: bool = False,
    minimal: bool = False,
    variants: Sequence[str] = (),
    **data: str | None,
) -> None:
    """Write the pipeline's files into the current directory, and the GPU workflow to the top of its git repository.

    ``data``, which names the path of ``images``, ``arrays`` or ``text``, ``model`` and its ``configuration`` (a file of
    ``transformers``) are written into a new params.yaml. An existing file is replaced only if ``init`` wrote it and
    nobody has changed it since. The files in ``LINES`` only get the lines that they lack. Before ``init`` changes an
    existing file, it shows the difference, and the user must agree: by ``yes``, or by an answer on the terminal. Added
    lines need no agreement.

    ``minimal``: only the settings, the stages, the lines of .gitignore and, if the repository has none, DVC's settings.
    ``variants``: the names of the shipped or ready-made variants for the new params.yaml, beside the baseline.

    Raises PipelineError if the user does not agree, and ConfigError if ``init`` cannot write its files here. In both
    cases nothing is written.
    """
    top = _top()
    record = _record()
    if not record:
        _check_room()
    whole = {name: _shipped(name) for name in MINIMAL} if minimal else _whole(top)
    kept = [name for name, text in whole.items() if _is_theirs(name, text, record)]
    if "Dockerfile" in kept:
        del whole[".dockerignore"]  # the user's Dockerfile needs the user's .dockerignore
        kept = [name for name in kept if name in whole]
    requested = {kind: path for kind, path in data.items() if path}
    if configuration:
        model = model or "transformers"
    if PARAMS_FILE.exists() and (requested or model or variants):
        raise ConfigError(
            f"init: {PARAMS_FILE} exists, and init does not change it; set fetch, train and variants there yourself."
        )
    wanted = {}
    if not PARAMS_FILE.exists():
        wanted[str(PARAMS_FILE)] = params_of(machine, model, configuration, requested, variants)
    wanted |= {name: _shipped(name) for name in ONCE if not Path(name).exists()}
    wanted |= {name: _with_lines(name, first) for name, first in LINES.items() if not minimal or name == ".gitignore"}
    wanted |= {name: text for name, text in whole.items() if name not in kept}
    targets = {name: _target(name, top) for name in (*wanted, str(RECORD))}
    changes = {name: text for name, text in wanted.items() if text != _text(name)}
    offered = (record if minimal else {}) | {name: _digest(text) for name, text in whole.items()}
    differing = changes | {name: whole[name] for name in kept if record.get(name) != offered[name]}
    for name, text in differing.items():
        if (present := _text(name)) is not None:
            to = f"{name}, as init writes it"
            lines = difflib.unified_diff(present.splitlines(), text.splitlines(), name, to, lineterm="")
            say("\n".join(lines))
    if any(Path(name).exists() for name in changes if name not in LINES) and not (yes or _agreed()):
        raise PipelineError(
            "init: nothing was written, because nobody answered yes; to write these changes, run init with --yes."
        )
    if record != offered:
        changes[str(RECORD)] = json.dumps(offered, indent=2) + "\n"
    for name, text in changes.items():
        files.write_text(targets[name], text)
        if text.startswith("#!"):
            targets[name].chmod(0o755)
    say(f"init: wrote {', '.join(changes) or 'nothing: no file needs a change'}")
    if kept:
        say(f"init: kept {', '.join(kept)}, because you changed, deleted or made these files")
    if str(PARAMS_FILE) in changes:
        config = params.load()
        say(
            f"init: {PARAMS_FILE} has {len(config.variants)} variants; the bench takes {config.bench.max_minutes:g} "
            "minutes, or more if six rounds do. Set the epochs, the optimizer and the learning rate of your own "
            "training in this file.\n"
            f"init: commit these files{_without(requested.values())}. Then "
            "`dvc repro prepare && python -m pipeline try` ranks the variants in five minutes, "
            "`python -m pipeline verify` shows whether each trains, and `dvc repro` which of them pay."
        )


def _without(paths: Iterable[str]) -> str:
    """Name those of the user's data that `git add` would take, because they are in the work tree and not ignored."""
    listing = ["git", "ls-files", "--others", "--exclude-standard", "--"]  # it fails for a path outside
    theirs = [path for path in paths if subprocess.run([*listing, path], capture_output=True).stdout]
    return f", but not {', '.join(theirs)}: `prepare` keeps the data in DVC's cache" if theirs else ""


def _top() -> Path:
    """Return the top of the git repository around the current directory."""
    if Path.cwd() == PROJECT:
        raise ConfigError("init: this is the pipeline's own checkout; run init in a repository of your own.")
    try:
        done = subprocess.run(["git", "rev-parse", "--show-toplevel"], capture_output=True, text=True)
    except FileNotFoundError:
        raise ConfigError("init: git is not installed; DVC and the gate need it.") from None
    if done.returncode:
        raise ConfigError(
            "init: git finds no repository here, and DVC and the gate need one; run `git init` first. "
            f"({done.stderr.strip()})"
        )
    return Path(done.stdout.removesuffix("\n"))


def _target(name: str, top: Path) -> Path:
    """Return the file that a write to ``name`` changes. If ``name`` is a link, it is the link's target, so that the
    link stays. Raises ConfigError if the file is not in the work tree under ``top``."""
    target, top = Path(name).resolve(), top.resolve()  # also of a link to nothing
    if not target.is_relative_to(top) or ".git" in target.relative_to(top).parts:
        raise ConfigError(
            f"init: {name} leads to {target}, which is not in the work tree of {top}; init writes nothing elsewhere: "
            "remove the link."
        )
    return target


def _record() -> dict[str, str]:
    try:
        return dict(files.read_json(RECORD))
    except FileNotFoundError:
        return {}
    except (TypeError, ValueError):  # for example after a merge
        raise ConfigError(
            f"init: {RECORD} is damaged; delete it and run init again, which then keeps all files that differ."
        ) from None


def _check_room() -> None:
    """Raise ConfigError if files of the user have names that the stages use. A valid params.yaml shows that these files
    belong to the pipeline already."""
    with suppress(ConfigError):
        params.load()
        return
    taken = re.findall(r"(?m)^/([\w.-]+)", _shipped(".gitignore").partition(LINES[".gitignore"])[2])
    names = sorted({*taken, "sessions", "dvc.yaml", str(PARAMS_FILE)})
    # Ignored files are listed too, because `dvc repro` deletes files at the paths of a stage's outputs.
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--", *names]
    listed = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split("\0")
    if theirs := sorted({name.partition("/")[0] for name in listed if name}):
        raise ConfigError(
            f"init: found {', '.join(theirs)}, but the stages use these names. Give the pipeline a folder of its own: "
            "mkdir performance && cd performance && python -m pipeline init. A link in this folder lets the pipeline "
            "import your package: ln -s ../PACKAGE ."
        )


def _whole(top: Path) -> dict[str, str]:
    """Return the files that ``init`` writes whole: path relative to the current directory -> content in this version.
    ``top``: the top of the git repository."""
    folder = Path.cwd().relative_to(top).as_posix()
    if not re.fullmatch(r"[\w./-]+", folder, re.ASCII):
        raise ConfigError(
            f"init: found the folder {folder!r}; rename it: the GPU workflow allows only letters, digits and _.-/."
        )
    texts = {name: _shipped(name) for name in WHOLE} | {str(params.SCHEMA_FILE): params.schema()}
    for name in AT_THE_TOP:
        text = _shipped(name)
        for old, new in IN_A_FOLDER if folder != "." else ():
            text = text.replace(old, new.replace("{}", folder))
        texts[os.path.relpath(top / name)] = text
    return texts


def _is_theirs(name: str, text: str, record: Mapping[str, str]) -> bool:
    """Return True if the user deleted the file, or created or changed it, so that it holds neither ``text`` nor what
    ``init`` last offered."""
    present = _text(name)
    return name in record if present is None else present != text and _digest(present) != record.get(name)


def _with_lines(name: str, first: str) -> str:
    """Return the user's file with the shipped lines that it lacks added at its end. Shipped lines before ``first`` do
    not count."""
    present = _text(name) or ""
    shipped = _shipped(name)
    lines = shipped[shipped.index(first) :].splitlines()
    missing = [line for line in lines if line not in present.splitlines()]
    return "\n".join([*filter(None, [present.rstrip("\n")]), *missing]) + "\n" if any(missing) else present


def _shipped(name: str) -> str:
    return (PROJECT / name).read_text(encoding="utf-8")


def _text(name: str) -> str | None:
    try:
        return files.read_text(Path(name))
    except FileNotFoundError:
        return None
    except UnicodeError:
        raise ConfigError(f"init: {name} is not UTF-8 text; convert it first.") from None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _agreed() -> bool:
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    return terminal and input("Write these changes? [y/N] ").strip().lower() in ("y", "yes")
