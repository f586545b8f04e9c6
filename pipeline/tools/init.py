"""``init``: write stages, settings and the GPU workflow into the user's repository.

The files come from the project itself (``PROJECT``), not from templates. ``RECORD`` holds the digest of each file as it
was last offered, so that a later version can tell its own changes from the user's, and keep the user's.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from pipeline import files, params
from pipeline.errors import ConfigError, PipelineError, printable
from pipeline.params import PARAMS_FILE, Machine
from pipeline.tools import variant_sets
from pipeline.tools.variant_sets import PROJECT

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
AT_THE_TOP = (".github/report.py", ".github/session", ".github/workflows/gpu.yml")
"""Files for the top of the git repository, where GitHub looks, even if the other files are in a folder."""
ONCE = (".dvc/config", ".dvc/.gitignore")
"""Files that are written only if they do not exist."""
LINES = {".dvcignore": "", ".gitignore": "# What `dvc repro` makes"}
"""File -> beginning of a line; from this line on, lines that the user's file lacks are added to it."""
IN_A_FOLDER = (
    ('REVISION="$GITHUB_SHA" .', 'REVISION="$GITHUB_SHA" {}'),
    ('"$CONTAINER" .ci/gpu', '"$CONTAINER" {}/.ci/gpu'),
    ("${{ runner.temp }}/copy/", "${{ runner.temp }}/copy/{}/"),
    ("run: .github/session", 'run: cd {} && "$GITHUB_WORKSPACE/.github/session"'),
)
"""Replacements (old, new) in the GPU workflow if the pipeline is in a folder, which stands for {}."""


def run(machine: Machine, *, images: str | None = None, model: str | None = None, yes: bool = False) -> None:
    """Write missing files into the current directory, and the workflow to the top of its git repository.

    ``images``, ``model``: the data and model of the job in a new params.yaml. An existing file is changed only if
    ``init`` wrote it and nobody changed it since, or by adding lines; and only after showing the difference, with
    ``yes`` or a yes on the terminal. Without that consent, or if something is in the way, raises ConfigError or
    PipelineError and writes nothing.
    """
    top, here = _top(), Path.cwd()
    folder = here.relative_to(top).as_posix()
    if here == PROJECT:
        raise ConfigError("init: this is the pipeline's own checkout; run it in a repository of yours.")
    if not re.fullmatch(r"[\w./-]+", folder, re.ASCII):
        raise ConfigError(f"init: found the folder {folder!r}; a workflow takes letters, digits and _.-/ alone.")
    record = _record()
    if not record:
        _check_room()
    whole = _whole(os.path.relpath(top), folder)
    kept = [name for name, text in whole.items() if _is_theirs(name, text, record)]
    if "Dockerfile" in kept:
        del whole[".dockerignore"]  # the user's Dockerfile needs the user's .dockerignore
        kept = [name for name in kept if name in whole]
    wanted = {} if PARAMS_FILE.exists() else {str(PARAMS_FILE): _params(machine, top, images, model)}
    if not wanted and (images or model):
        raise ConfigError(f"init: {PARAMS_FILE} is there; set fetch.image_folder and train.model in it.")
    wanted |= {name: _shipped(name) for name in ONCE if not Path(name).exists()}
    wanted |= {name: _with_lines(name, first) for name, first in LINES.items()}
    wanted |= {name: text for name, text in whole.items() if name not in kept}
    changes = {name: text for name, text in wanted.items() if text != _text(name)}
    offered = {name: _digest(text) for name, text in whole.items()}
    news = [name for name in kept if Path(name).exists() and record.get(name) != offered[name]]
    _show({name: changes.get(name, whole.get(name, "")) for name in (*changes, *news) if Path(name).exists()})
    if any(Path(name).exists() for name in changes) and not (yes or _agreed()):
        raise PipelineError("init: nothing was written; run it again with --yes, which writes this.")
    if record != offered:
        changes[str(RECORD)] = json.dumps(offered, indent=2) + "\n"
    for name, text in changes.items():
        files.write_text(Path(name).resolve(), text)  # a link stays a link
        if text.startswith("#!"):
            Path(name).chmod(0o755)
    print(f"init: wrote {', '.join(changes) or 'nothing: all is as this version would write it'}")
    if kept:
        print(f"init: kept {', '.join(kept)} as you have them (changed, deleted, or yours from the start)")
    if str(PARAMS_FILE) in changes:
        config = params.load()
        print(
            f"init: {len(config.variants)} variants, {config.bench.max_minutes:g} minutes of bench. Commit this. Then "
            "`dvc repro prepare && python -m pipeline verify` tells whether each trains, and `dvc repro` which pays."
        )


def _top() -> Path:
    try:
        done = subprocess.run(["git", "rev-parse", "--show-toplevel"], capture_output=True, text=True)
    except FileNotFoundError:
        raise ConfigError("init: git is not installed; DVC and the gate need it.") from None
    if done.returncode:
        raise ConfigError(f"init: DVC and the gate need a git repository; `git init` first. ({done.stderr.strip()})")
    return Path(done.stdout.removesuffix("\n"))


def _record() -> dict[str, str]:
    try:
        return dict(json.loads(_text(str(RECORD)) or "{}"))
    except (TypeError, ValueError):  # after a merge, say
        raise ConfigError(f"init: {RECORD} is damaged; delete it: what differs then counts as yours.") from None


def _check_room() -> None:
    """Raise ConfigError if files of the user have names that the stages use, params.yaml among them."""
    with suppress(ConfigError):
        params.load()
        return  # params.yaml is the pipeline's already
    taken = re.findall(r"(?m)^/([\w.-]+)", _shipped(".gitignore").partition(LINES[".gitignore"])[2])
    names = sorted({*taken, "sessions", "dvc.yaml", str(PARAMS_FILE)})
    # With what git ignores: `dvc repro` deletes what lies at a stage's outs.
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--", *names]
    listed = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split("\0")
    if found := sorted({name.partition("/")[0] for name in listed if name}):
        raise ConfigError(
            f"init: found {', '.join(found)}, but the stages take these names. Give the pipeline a folder of its own: "
            "mkdir performance && cd performance && python -m pipeline init"
        )


def _whole(top: str, folder: str) -> dict[str, str]:
    """File, relative to the current directory -> its content in this version."""
    texts = {name: _shipped(name) for name in WHOLE} | {str(params.SCHEMA_FILE): params.schema()}
    for name in AT_THE_TOP:
        text = _shipped(name)
        for old, new in IN_A_FOLDER if folder != "." else ():
            text = text.replace(old, new.replace("{}", folder))
        texts[os.path.normpath(Path(top, name))] = text
    return texts


def _is_theirs(name: str, text: str, record: Mapping[str, str]) -> bool:
    """True if the user changed, created or deleted the file: its state is neither ``text`` nor what ``init`` left."""
    there = _text(name)
    return name in record if there is None else there != text and _digest(there) != record.get(name)


def _with_lines(name: str, first: str) -> str:
    """The user's file plus the shipped lines, from ``first`` on, that it lacks."""
    there = _text(name) or ""
    shipped = _shipped(name)
    lines = shipped[shipped.index(first) :].splitlines()
    missing = [line for line in lines if line not in there.splitlines()]
    return "\n".join([*filter(None, [there.rstrip("\n")]), *missing]) + "\n" if any(missing) else there


def _shipped(name: str) -> str:
    return (PROJECT / name).read_text(encoding="utf-8")


def _text(name: str) -> str | None:
    try:
        return Path(name).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeError:
        raise ConfigError(f"init: {name} is no text in UTF-8; move it away, and run it again.") from None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _show(texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        there = (_text(name) or "").splitlines()
        lines = difflib.unified_diff(there, text.splitlines(), name, f"{name}, as init has it", lineterm="")
        print(printable("\n".join(lines)))


def _agreed() -> bool:
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    return terminal and input("Write this? [y/N] ").strip().lower() in ("y", "yes")


def _params(machine: Machine, top: Path, images: str | None, model: str | None) -> str:
    """The shipped params.yaml; with ``images`` or ``model``, a job on them with variants that this machine can run.

    Raises ConfigError if the images or the model do not exist.
    """
    text = _shipped(str(PARAMS_FILE))
    if images is None and model is None:
        return text
    shipped = params.parse(yaml.safe_load(text))
    text, why = _with(text, "model", model or "resnet18"), []
    if images is not None:
        count, side = _looked_at(Path(images))
        batch = 1 << max(3, min(8, (count // 20).bit_length() - 1))  # about twenty steps an epoch
        found = {"dataset": "image_folder", "image_folder": images, "image_size": [side, side], "batch_size": batch}
        for key, value in found.items():
            text = _with(text, key, value)
        why = [
            f"batch_size {batch}: about twenty steps an epoch of {count:,} images, from 8 to 256",
            f"image_size {side}x{side}: the median of the images' shorter sides, in eights, at most 224",
        ]
    variants, left_out = _variants(machine, yaml.safe_load(text), own=":" in (model or ""))
    arms, as_shipped = (len(each) + 1 for each in (variants, shipped.variants))  # plus the A/A control
    text = _with(text, "max_minutes", round(shipped.bench.max_minutes * arms / as_shipped, 1))
    why += [f"max_minutes: in proportion to the variants, {len(variants)} and the A/A control", *left_out]
    why += ["epochs, optimizer and learning_rate are the shipped example's: set those of your training"]
    chosen = "\n#   ".join(("\n# What `init` chose for this job and machine:", *why))
    written = yaml.safe_dump({"variants": variants}, sort_keys=False)
    text = text[: text.index("\n# One entry a variant")] + f"{chosen}\n{written}"
    try:
        params.check_names(params.parse(yaml.safe_load(text)).train)
    except ConfigError as error:
        module = str(model).partition(":")[0].partition(".")[0]
        paths = [each for each in (top / module, top / f"{module}.py") if top != Path.cwd() and each.exists()]
        remedy = "".join(f" `ln -s {os.path.relpath(each)} .` brings it here." for each in paths)
        raise ConfigError(f"{str(error).replace(f'{PARAMS_FILE}: train.model', '--model')}{remedy}") from None
    return text


def _with(text: str, key: str, value: object) -> str:
    """params.yaml with ``value`` for the first ``key`` of a section; the comment of that line stays."""
    written = yaml.safe_dump([value], default_flow_style=True, allow_unicode=True, width=10**6).strip()[1:-1]
    old = re.search(rf"(?m)^  {key}: [^#\n]*", text)
    assert old is not None
    return text[: old.start()] + f"  {key}: {written} ".ljust(len(old[0])) + text[old.end() :]


def _variants(machine: Machine, values: Mapping[str, Any], *, own: bool) -> tuple[dict[str, Any], list[str]]:
    """The shipped variants, and the ready-made ones that most often make steps faster, if this machine can run them;
    and why some are left out."""
    speed = yaml.safe_load(_shipped("variants/speed.yaml"))
    found = values["variants"] | {name: speed[name] for name in ("channels-last", "bf16", "tf32", "compiled")}
    why = []
    for name, least in (("ddp", 2), ("compiled", 1)):  # with fewer GPUs the variant costs minutes and seldom pays
        if machine.gpus < least:
            del found[name]
            why.append(f"no {name}: with fewer than {least} GPU(s) it costs minutes and seldom pays")
    if own:
        del found["memory"]["activation_checkpointing"]
        why.append("memory without activation_checkpointing: it needs a model with blocks, which yours may have")
    config = params.parse(values)
    here = {name: variant_sets.can_run(config, name, each, machine) for name, each in found.items()}
    why += [
        f"no {name}: {words.removeprefix(f'{name} is left out: ')}" for name, (runs, words) in here.items() if not runs
    ]
    return {name: found[name] for name, (runs, _) in here.items() if runs}, why


def _looked_at(folder: Path) -> tuple[int, int]:
    """The number of training images, and the side in pixels to train on: the median shorter side of about a hundred
    images, rounded down to a multiple of 8, from 8 to 224. Raises ConfigError if no image can be read."""
    from PIL import Image

    from pipeline.data.sources.local import IMAGE_SUFFIXES, parent_instead

    train = folder.expanduser() / "train"
    paths = sorted(path for path in train.glob("*/**/*") if path.suffix.lower() in IMAGE_SUFFIXES)
    sides = []
    for path in paths[:: len(paths) // 100 + 1]:
        with suppress(OSError, Image.DecompressionBombError), Image.open(path) as image:
            sides.append(min(image.size))
    if not sides:
        raise ConfigError(
            f"--images: found {str(folder)!r}; expected a folder with images as train/CLASS/* in it."
            f"{parent_instead(folder.expanduser())}"
        )
    return len(paths), max(8, min(224, int(statistics.median(sides)) // 8 * 8))
