"""Check that the named task, model, loss and metric exist, without importing their modules.

An import would load torch, which takes seconds, so the name is looked for among the words of the source file. Some
names are not visible in the source, such as those from ``import *``. Such names are checked only later, when the module
is imported.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from pipeline.errors import ConfigError, did_you_mean
from pipeline.params.sections import Train
from pipeline.params.variants import Variant

OWN_MODELS = ("small_cnn", "resnet9", "mlp", "gpt", "transformers")
_DYNAMIC = {"import *", "__getattr__", "exec", "globals", "setattr", "vars"}
"""Words with which a module may define names that its source does not show."""


def check_names(train: Train, variants: Mapping[str, Variant] | None = None) -> None:
    """Raise ConfigError if a name in ``train`` or ``variants`` does not exist, as far as source files show this.

    The names are those of the task, the models, the teachers' models and files, the loss and the metric. The message
    lists every wrong name.
    """
    problems: list[str | None] = []
    named = {f"train.{key}": getattr(train, key) for key in ("task", "model", "loss", "metric")}
    for name, variant in (variants or {}).items():
        named |= {f"variants.{name}.model": variant.model} if variant.model else {}
        taught = variant.distillation
        if taught and taught.model not in (None, train.model):
            named[f"variants.{name}.distillation.model"] = taught.model
        if taught and taught.file and not taught.file.is_file():
            problems.append(f"variants.{name}.distillation.teacher: found '{taught.file}', which is not a file.")
    if train.weights and not Path(train.weights).expanduser().exists():
        problems.append(f"train.weights: found '{train.weights}', which is neither a file nor a folder.")
    for key, name in named.items():
        if ":" in name:
            problems.append(_own_problem(key, name))
        elif key.endswith("model") and name not in OWN_MODELS and (known := torchvision_models()):
            problems.append(unknown_model(name, known, key))
    if wrong := list(filter(None, problems)):
        raise ConfigError("\n".join(f"params.yaml: {problem}" for problem in wrong))


def unknown_model(name: str, known: Sequence[str], key: str = "train.model") -> str | None:
    """Return why ``name`` is not a model; None if it is one. ``known``: torchvision's classification models."""
    if name in OWN_MODELS or name in known:
        return None
    return (
        f"{key}: found {name!r}.{did_you_mean(name, (*OWN_MODELS, *known))} Allowed: {', '.join(OWN_MODELS)}, a "
        "torchvision classification model, or module:factory of your own."
    )


def torchvision_models() -> list[str]:
    """Return the names of the classification models that torchvision registers; an empty list without torchvision."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return []
    texts = (file.read_text(encoding="utf-8") for file in Path(spec.origin).with_name("models").glob("*.py"))
    return sorted(name for text in texts for name in re.findall(r"(?ms)^@register_model\(\)\n.*?^def (\w+)", text))


def _own_problem(key: str, name: str) -> str | None:
    """Return the mistake in ``name`` (``module:function``) that the source files reveal; None if they reveal none."""
    module, _, attribute = name.partition(":")
    spec, missing = _spec(module)
    if spec is None:
        return f"{key}: found {name!r}, but there is no module {missing!r}, neither installed nor in {Path.cwd()}."
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    words = set(re.findall(r"import \*|\w+", Path(spec.origin).read_text(encoding="utf-8", errors="replace")))
    if words & {attribute, *_DYNAMIC}:
        return None
    return f"{key}: found {name!r}, but {spec.origin} has no {attribute!r}.{did_you_mean(attribute, words)}"


def _spec(module: str) -> tuple[ModuleSpec | None, str]:
    """Return the module's spec and name. If the module or a parent package is missing, return None and the name of the
    first one that is missing. Unlike find_spec, this does not import parent packages."""
    top, *below = module.split(".")
    spec = PathFinder.find_spec(top, [str(Path.cwd())]) or importlib.util.find_spec(top)
    name = top
    for part in below:
        if spec is None:
            break
        name = f"{name}.{part}"
        # Only the last part: without __init__.py, PathFinder would look up a dotted name's parent in sys.modules.
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations or []))
    return spec, name
