"""The params.yaml of a new job, which ``init`` decides from the form of the data and by a look at the model."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import params
from pipeline.data.prepared import input_names, like_targets
from pipeline.errors import ConfigError, PipelineError, did_you_mean, first_line, say
from pipeline.params import PARAMS_FILE, Config, Fetch, Machine, Prepare
from pipeline.params.loading import read_yaml
from pipeline.tools import choices
from pipeline.tools.choices import PROJECT

if TYPE_CHECKING:
    from pipeline.tools.building import Built

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

_Inspected = tuple[dict[str, dict[str, Any]], int]
"""Settings for sections of params.yaml, and the number of samples or windows."""


def params_of(
    machine: Machine, model: str | None, configuration: str | None, data: Mapping[str, str], chosen: Sequence[str]
) -> str:
    """Return the shipped params.yaml. If ``data``, ``model`` or ``chosen`` variants are given, its job is changed to
    use them, and its variants are replaced by the chosen ones or by variants that this machine can run.

    Raises PipelineError if the data, the model or a variant do not exist.
    """
    text = (PROJECT / PARAMS_FILE).read_text(encoding="utf-8")
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
    images, look = _tried(config)
    if "optimizer" not in train and look.attends:
        document["train"].update(OF_TRANSFORMERS)
    if own_model:
        document["train"].yaml_set_comment_before_after_key(
            "seeds", before=_fine_tuning(configuration, look.patterns), indent=2
        )
    shipped_arms = len(document["variants"]) + 1  # plus the A/A control
    left_out = _choose_variants(document, machine, chosen, images=images, has_blocks=look.has_blocks)
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
        look = built(config, dataset)
    except PipelineError as error:
        remedy = f"correct it, or run init without --model and set train.model in {PARAMS_FILE} yourself"
        raise ConfigError(f"init: nothing was written: {first_line(error).rstrip('.')}; {remedy}.") from error
    parts = ["blocks to checkpoint" if look.has_blocks else "no blocks to checkpoint"] + ["attention"] * look.attends
    seconds = f"{look.step_seconds:.2g} s a step of {config.train.batch_size} samples on this CPU"
    say(f"init: {config.train.model} has {' and '.join(parts)}; about {seconds}")
    return images, look


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
        available = ready | variants
        for name in chosen:
            if name not in available:
                raise ConfigError(f"--variants: found {name!r}, which is no variant.{did_you_mean(name, available)}")
        wanted = {name: available[name] for name in chosen if name != baseline}
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
