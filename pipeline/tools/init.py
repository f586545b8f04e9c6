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
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import files, params
from pipeline.data.prepared import input_names, like_targets
from pipeline.errors import ConfigError, PipelineError, did_you_mean, first_line, say
from pipeline.params import PARAMS_FILE, Config, Fetch, Machine, Prepare
from pipeline.params.loading import read_yaml
from pipeline.tools import choices
from pipeline.tools.choices import PROJECT

if TYPE_CHECKING:
    from pipeline.tools.building import Built

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
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "language_model": {"optimizer": "adamw", "learning_rate": 0.001},
    "regression": {"learning_rate": 0.01},
}
"""Task -> optimizer and learning rate of its usual model, if they differ from the defaults. Transformers are usually
trained with AdamW, and many regressions diverge at the default rate."""
OF_TRANSFORMERS = {"optimizer": "adamw", "learning_rate": 0.0005}
"""The same for another task's model that is a transformer. Source of the rate: Touvron and others, "Training
data-efficient image transformers & distillation through attention", ICML 2021, for 512 samples a step."""
FINE_TUNING = """To fine-tune, uncomment these lines. Transformers then need a smaller learning rate, such as 5.0e-5.
weights: {weights}
allow_new: {new}   # what the weights may lack, or have in another shape; it begins with new values
frozen: {frozen}   # what is not trained"""
"""Comment beside the user's model. Source of the rate: Devlin and others, "BERT", NAACL 2019, appendix A.3."""
IN_A_FOLDER = (
    ('REVISION="$GITHUB_SHA" .', 'REVISION="$GITHUB_SHA" {}'),
    ('"$CONTAINER" .ci/gpu', '"$CONTAINER" {}/.ci/gpu'),
    ("${{ runner.temp }}/copy/", "${{ runner.temp }}/copy/{}/"),
    ("run: .github/session", 'run: cd {} && "$GITHUB_WORKSPACE/.github/session"'),
)
"""Replacements (old, new) in the GPU workflow if the pipeline is in a folder; {} stands for this folder."""


_Inspected = tuple[dict[str, dict[str, Any]], int]
"""Settings for sections of params.yaml, and the number of samples or windows."""


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
        wanted[str(PARAMS_FILE)] = _params(machine, model, configuration, requested, variants)
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
            "init: commit these files. Then `dvc repro prepare && python -m pipeline try` ranks the variants in five "
            "minutes, `python -m pipeline verify` shows whether each trains, and `dvc repro` which of them pay."
        )


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


def _params(
    machine: Machine, model: str | None, configuration: str | None, data: Mapping[str, str], chosen: Sequence[str]
) -> str:
    """Return the shipped params.yaml. If ``data``, ``model`` or ``chosen`` variants are given, its job is changed to
    use them, and its variants are replaced by the chosen ones or by variants that this machine can run.

    Raises PipelineError if the data, the model or a variant do not exist.
    """
    text = _shipped(str(PARAMS_FILE))
    if not data and model is None and not chosen:
        return text
    editor = choices.editor()
    document = editor.load(text)
    own_model, train = model, {"model": "resnet18"} if data else {}
    for kind, path in data.items():
        settings, count = _LOOKS[kind](path)
        about_20_steps_an_epoch = 1 << max(3, min(8, (count // 20).bit_length() - 1))
        train |= settings.pop("train") | {"batch_size": about_20_steps_an_epoch}
        for section, values in settings.items():
            document[section].update(values)
    if (model := model or train.get("model", document["train"]["model"])) is None:
        raise ConfigError(
            f"--arrays: init knows no model for the shapes in {path}; name your own, such as --model my_nets:factory, "
            "or, for tokens, --config config.json of a model of transformers."
        )
    if model == "transformers" and not configuration:
        raise ConfigError("--model: found 'transformers'; add --config FILE, the config.json of one of its models.")
    train |= {"model": model} | ({"model_options": {"config": configuration}} if configuration else {})
    document["train"].update(train)
    config = params.parse(document)
    params.check_names(config.train)
    images, seen = _tried(config)
    if "optimizer" not in train and seen.attends:
        document["train"].update(OF_TRANSFORMERS)
    if own_model:
        document["train"].yaml_set_comment_before_after_key(
            "seeds", before=_fine_tuning(configuration, seen.patterns), indent=2
        )
    shipped_arms = len(document["variants"]) + 1  # plus the A/A control
    left_out = _choose_variants(document, machine, chosen, images=images, has_blocks=seen.has_blocks)
    bench = document["bench"]
    bench["max_minutes"] = round(bench["max_minutes"] * (len(document["variants"]) + 1) / shipped_arms, 1)
    if left_out:
        comment = "\n  ".join(("What `init` left out for this job and machine:", *left_out))
        document.yaml_set_comment_before_after_key("variants", before=comment)
    params.parse(document)
    written = StringIO()
    editor.dump(document, written)
    return written.getvalue()


def _tried(config: Config) -> tuple[bool, Built]:
    """Return whether inputs are images, and what the model shows when it is built, which is also printed. Raises
    ConfigError if it cannot be built."""
    from pipeline.tools.building import built, imitation

    dataset = imitation(config)
    assert dataset is not None  # the data are files
    images = any(dataset.train.arrays[name].ndim == 4 for name in input_names(dataset.train.arrays))
    try:
        seen = built(config, dataset)
    except PipelineError as error:
        remedy = f"correct it, or run init without --model and set train.model in {PARAMS_FILE} yourself"
        raise ConfigError(f"init: nothing was written: {config.train.model}: {first_line(error)} ({remedy})") from error
    parts = ["blocks to checkpoint" if seen.has_blocks else "no blocks to checkpoint"] + ["attention"] * seen.attends
    seconds = f"{seen.step_seconds:.2g} s a step of {config.train.batch_size} samples on this CPU"
    say(f"init: {config.train.model} has {' and '.join(parts)}; about {seconds}")
    return images, seen


def _fine_tuning(configuration: str | None, patterns: list[str]) -> str:
    """Return the settings of a fine-tuning, with the weights beside the ``configuration``, if there are any. The last
    of the ``patterns`` of the model's parts is taken for the head."""
    folder = Path(configuration).parent if configuration else None
    weights = str(folder) if folder and any(folder.glob("model.safetensors*")) else "pretrained.safetensors"
    *frozen, head = patterns
    return FINE_TUNING.format(weights=json.dumps(weights), new=json.dumps([head]), frozen=json.dumps(frozen))


def _choose_variants(
    document: Any, machine: Machine, chosen: Sequence[str], *, images: bool, has_blocks: bool
) -> list[str]:
    """Leave the baseline and the ``chosen`` variants in ``document``, the content of params.yaml; without any, those
    that this machine can run, of the shipped variants and of the ready-made ones that most often make steps faster.

    Return the reasons why others are left out. ``images``: whether the inputs are images. ``has_blocks``: whether the
    model has blocks to checkpoint.
    """
    variants, baseline = document["variants"], document["compare"]["baseline"]
    if chosen:
        ready = {
            name: values for path in sorted(PROJECT.glob("variants/*.yaml")) for name, values in read_yaml(path).items()
        }
        known = ready | variants
        for name in chosen:
            if name not in known:
                raise ConfigError(f"--variants: found {name!r}, which is no variant.{did_you_mean(name, known)}")
        wanted = {name: known[name] for name in chosen if name != baseline}
        for name in [name for name in variants if name != baseline]:
            variants.pop(name)
        variants.update(wanted)
        return []
    speed, memory = read_yaml(PROJECT / "variants/speed.yaml"), variants["memory"]
    variants.update({name: speed[name] for name in ("channels-last", "bf16", "tf32", "compiled")})
    left_out = {}
    if machine.gpus < 2:
        left_out["ddp"] = "with fewer than 2 GPUs it costs minutes and seldom pays"
    if machine.gpus == 0:
        left_out["compiled"] = "without a GPU it costs minutes and seldom pays"
    if not images:
        del memory["channels_last"]
        left_out["channels-last"] = "the inputs are not images"
    if not has_blocks:
        del memory["activation_checkpointing"]
        left_out["activation_checkpointing"] = "it needs blocks: add it to memory if your model has blocks"
    config = params.parse(document)
    for name, values in variants.items():
        runs, words = choices.can_run(config, name, values, machine)
        if not runs:
            left_out.setdefault(name, words)
    for name in left_out:
        variants.pop(name, None)
    return [f"{name}: {reason}" for name, reason in left_out.items()]


def _images(path: str) -> _Inspected:
    """Inspect an image folder. Raises DataError.

    ``image_size`` is a square. Its side, in pixels, is the median shorter side of up to a hundred training images. It
    is rounded down to a multiple of 8, and is at least 8 and at most 224.
    """
    from PIL import Image

    from pipeline.data.own_files import images_of

    root, names = images_of(Fetch(dataset="image_folder", image_folder=path))
    names = [name for name in names if name.startswith("train/")]
    sides = []
    for name in names[:: len(names) // 100 + 1]:
        with suppress(OSError, Image.DecompressionBombError), Image.open(root / name) as image:
            sides.append(min(image.size))
    side = max(8, min(224, int(statistics.median(sides or [224])) // 8 * 8))
    fetch = {"dataset": "image_folder", "image_folder": path}
    return {"fetch": fetch, "prepare": {"image_size": [side, side]}, "train": {}}, len(names)


def _arrays(path: str) -> _Inspected:
    """Inspect arrays. The model is None if ``init`` knows none for these shapes and names. Raises PipelineError if the
    arrays cannot be read, or if no task follows from their shapes and types."""
    from pipeline.data import arrays

    fetch = Fetch(dataset="arrays", arrays=path)
    if arrays.is_exported(fetch):
        raise ConfigError(f"--arrays: found {path}, but init reads only files; write {PARAMS_FILE} yourself.")
    contents, _ = arrays.splits(fetch, arrays.opened(fetch))
    inputs, targets, by_name = contents[input_names(contents)[0]], contents.get("targets"), "inputs" not in contents
    task, fitting = "regression", {2: "mlp"}
    if targets is None:
        task, fitting = "language_model", {2: "gpt"}
    elif targets.dtype.kind in "iu":
        of_tokens = arrays.TOKENS in contents and targets.shape == inputs.shape
        of_several = targets.ndim == 2 and targets.max(initial=0) < 2 and not of_tokens
        task, fitting = "multi_label" if of_several else "classification", {2: "mlp", 4: "resnet18"}
    model, labels = None if by_name else fitting.get(inputs.ndim), like_targets(contents)
    if targets is None and (labels or model is None or inputs.dtype.kind not in "iu"):
        raise ConfigError(
            f"--arrays: found {arrays.named(contents)}, for which init knows no task; add the array targets, or "
            f"rename {labels or 'what holds them'}, or write {PARAMS_FILE} yourself."
        )
    train = {"task": task, "model": model} | OPTIMIZERS.get(task, {})
    return {"fetch": {"dataset": "arrays", "arrays": path}, "train": train}, len(inputs)


def _text_files(path: str) -> _Inspected:
    """Inspect a folder of text. Raises DataError if the folder has fewer than two files, or an empty file."""
    from pipeline.data import text

    fetch = Fetch(dataset="text_folder", text_folder=path)
    size = sum((text.root(fetch) / name).stat().st_size for name in text.files(fetch))
    train = {"task": "language_model", "model": "gpt"} | OPTIMIZERS["language_model"]
    return {"fetch": {"dataset": "text_folder", "text_folder": path}, "train": train}, size // Prepare().window


_LOOKS = {"images": _images, "arrays": _arrays, "text": _text_files}
"""Option -> the function that inspects its data."""
