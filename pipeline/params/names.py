"""Check that the named task, model, loss and metric exist, without importing their modules.

An import would load torch, which takes seconds, so source files are parsed instead. Some names are not visible in the
source, such as those from ``import *``. Such names are checked only later, when the module is imported.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from pipeline.errors import ConfigError, did_you_mean
from pipeline.params.catalogue import Variant
from pipeline.params.sections import Train

OWN_MODELS = ("small_cnn", "resnet9", "mlp", "gpt", "transformers")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def check_names(train: Train, variants: Mapping[str, Variant] | None = None) -> None:
    """Raise ConfigError if a name in ``train`` or ``variants`` does not exist, as far as source files show this.

    The names are those of the task, the models, the teachers' models and files, the loss and the metric. The message
    lists every wrong name.
    """
    problems: list[str | None] = []
    named = {f"train.{key}": getattr(train, key) for key in ("task", "model", "loss", "metric")}
    for variant, each in (variants or {}).items():
        named |= {f"variants.{variant}.model": each.model} if each.model else {}
        if each.distillation and each.distillation.model not in (None, train.model):
            named[f"variants.{variant}.distillation.model"] = each.distillation.model
        if each.distillation and (file := each.distillation.file) and not file.is_file():
            problems.append(f"variants.{variant}.distillation.teacher: found '{file}', which is not a file.")
    for key, name in named.items():
        if ":" in name:
            problems.append(_own_problem(key, name))
        elif key.endswith("model") and name not in OWN_MODELS and (there := torchvision_models()):
            problems.append(unknown_model(name, there, key))
    if found := list(filter(None, problems)):
        raise ConfigError("\n".join(f"params.yaml: {problem}" for problem in found))


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
    return sorted(
        node.name
        for file in Path(spec.origin).with_name("models").glob("*.py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(decorator) == "register_model()" for decorator in node.decorator_list)
    )


def _own_problem(key: str, name: str) -> str | None:
    """Return the mistake in ``name`` (``module:function``) that the source files reveal; None if they reveal none."""
    module, _, attribute = name.partition(":")
    spec, missing = _found(module)
    if spec is None:
        return f"{key}: found {name!r}, but there is no module {missing!r}, neither installed nor in {Path.cwd()}."
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        names = set(_names(ast.parse(Path(spec.origin).read_bytes()).body))
    except SyntaxError as error:
        return f"{key}: found {name!r}, but {spec.origin} is not valid Python: {error.msg} in line {error.lineno}."
    if names & {attribute, "*", "__getattr__"}:
        return None
    return f"{key}: found {name!r}, but {spec.origin} has no {attribute!r}.{did_you_mean(attribute, names)}"


def _found(module: str) -> tuple[ModuleSpec | None, str]:
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


def _names(statements: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield the names that a module's ``statements`` define, import or mention; "*" for a statement that may define
    names that the source does not show."""
    for node in statements:
        if isinstance(node, _DEFINITIONS):
            yield node.name
            continue
        for each in ast.walk(node):
            if isinstance(each, _DEFINITIONS):
                yield each.name
            elif isinstance(each, ast.Import | ast.ImportFrom):
                yield from ((alias.asname or alias.name).partition(".")[0] for alias in each.names)
            elif isinstance(each, ast.Name):
                yield "*" if each.id in ("globals", "vars", "setattr", "exec") else each.id
