"""Whether the names of model, loss and metric stand for something, found without importing what they name.

What is imported would bring torch, seconds before anything runs. So files are found and read as text; what cannot be
known that way, such as a name that a module takes from elsewhere by ``*``, is left to the import.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from pipeline.errors import ConfigError
from pipeline.params.sections import Train

OWN_MODELS = ("small_cnn", "resnet9")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def check_names(train: Train) -> None:
    """Raise ConfigError if ``train`` names a model, a loss or a metric that is not there, naming every one."""
    problems = []
    for key, known in (("model", None), ("loss", "cross_entropy"), ("metric", "accuracy")):
        name = getattr(train, key)
        if ":" in name:
            problems.append(_own_problem(f"train.{key}", name))
        elif known is None and name not in OWN_MODELS and (there := torchvision_models()):
            problems.append(unknown_model(name, there))
    if found := list(filter(None, problems)):
        raise ConfigError("\n".join(f"params.yaml: {problem}" for problem in found))


def unknown_model(name: str, known: Sequence[str]) -> str | None:
    """What is wrong with ``name``, of which ``known`` are torchvision's classification models; None if it is one."""
    if name in OWN_MODELS or name in known:
        return None
    close = difflib.get_close_matches(name, [*OWN_MODELS, *known], n=3, cutoff=0.5)
    return (
        f"train.model: found {name!r}; "
        + (f"did you mean {' or '.join(close)}? " if close else "")
        + f"Allowed: {', '.join(OWN_MODELS)}, a torchvision classification model, or module:factory of your own."
    )


def torchvision_models() -> list[str]:
    """Names of the installed torchvision's classification models: the functions that it registers as builders."""
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
    """What is wrong with ``name``, ``module:function``, as far as its file tells."""
    module, _, attribute = name.partition(":")
    spec, missing = _found(module)
    if spec is None:
        return f"{key}: found {name!r}, but there is no module {missing!r}, neither installed nor in {Path.cwd()}."
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        names = set(_names(ast.parse(Path(spec.origin).read_bytes()).body))
    except SyntaxError as error:
        return f"{key}: found {name!r}, but {spec.origin} is no Python: {error.msg} in line {error.lineno}."
    if names & {attribute, "*", "__getattr__"}:
        return None
    close = difflib.get_close_matches(attribute, names, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    return f"{key}: found {name!r}, but {spec.origin} has no {attribute!r}.{hint}"


def _found(module: str) -> tuple[ModuleSpec | None, str]:
    """Where ``module`` is; None with what of its name is not there. ``find_spec`` alone would import its packages."""
    top, *below = module.split(".")
    spec = PathFinder.find_spec(top, [str(Path.cwd())]) or importlib.util.find_spec(top)
    name = top
    for part in below:
        if spec is None:
            break
        name = f"{name}.{part}"
        # By its last part: of a dotted name without an __init__.py it would look for the parent in sys.modules.
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations or []))
    return spec, name


def _names(statements: Sequence[ast.stmt]) -> Iterator[str]:
    """What the ``statements`` of a module bind; "*" where that cannot be read off."""
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
