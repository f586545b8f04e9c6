"""Sets of ready-made variants for params.yaml. Each set is a file in the folder ``variants/`` of the current directory
or, if there is no such folder, of the project."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Callable, Mapping
from io import StringIO
from itertools import takewhile
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from pipeline import files
from pipeline.environment.imports import PACKAGE
from pipeline.errors import ConfigError, say
from pipeline.params import PARAMS_FILE, Config, Machine, Variant, load, parse, requested
from pipeline.params.loading import read_yaml
from pipeline.plans import plan

PROJECT = next(folder for folder in (PACKAGE / "project", PACKAGE.parent) if folder.is_dir())
"""Directory of the files that the project ships: ``project`` in an installed package (see pyproject.toml), or the
checkout."""
FOLDER = Path("variants")
NULL_TAG = "tag:yaml.org,2002:null"


def show(machine: Machine, name: str | None, *, add: bool) -> None:
    """Print all sets. If a ``name`` is given, print this set's variants instead, and whether each can run here. With
    ``add``, also add the variants that can run here to params.yaml.

    Raises ConfigError if there is no such set. With ``add``, also raises it if params.yaml has a different variant of
    the same name.
    """
    folder = FOLDER if FOLDER.is_dir() else PROJECT / FOLDER
    if name is None:
        width = min(shutil.get_terminal_size((100, 24)).columns, 120)
        wrapper = textwrap.TextWrapper(width, subsequent_indent=" " * 15, break_on_hyphens=False)
        for path in sorted(folder.glob("*.yaml")):
            for first, text in ((path.stem, _about(path)), ("", ", ".join(_variants_in(path)))):
                wrapper.initial_indent = f"{first:15}"
                say(wrapper.fill(text))
        return
    path = folder / f"{name}.yaml"
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in known:
        raise ConfigError(f"variants: found {name!r}; expected the name of a set: {', '.join(known)}.")
    config, chosen = load(), _variants_in(path)
    runs = {variant: can_run(config, variant, values, machine) for variant, values in chosen.items()}
    for variant, (_, words) in runs.items():
        say(f"{variant:28} {words}")
    if add:
        added = _add(config, {variant: values for variant, values in chosen.items() if runs[variant][0]})
        say(f"{PARAMS_FILE}: added {', '.join(added) or 'nothing: it already has all variants that can run here'}")


def _about(path: Path) -> str:
    """Return the comment at the top of the file as one line."""
    lines = files.read_text(path).splitlines()
    return " ".join(line.lstrip("# ") for line in takewhile(lambda line: line.startswith("#"), lines))


def _variants_in(path: Path) -> dict[str, dict[str, Any]]:
    values = read_yaml(path)
    if not isinstance(values, dict) or not values:
        raise ConfigError(f"{path}: found {values!r}; expected variants, each under its name as in {PARAMS_FILE}.")
    parse({"compare": {"baseline": next(iter(values))}, "variants": values}, str(path))  # raises ConfigError if wrong
    return dict(values)


def can_run(config: Config, name: str, values: Mapping[str, Any], machine: Machine) -> tuple[bool, str]:
    """Return False and the reason if the variant cannot run here, or if it has techniques and all are skipped.
    Otherwise return True and a remark."""
    variant = _parsed(name, values)
    try:
        made = plan(config.model_copy(update={"variants": {name: variant}}), name, machine)
    except ConfigError as error:
        return False, str(error)
    skipped = "; ".join(f"{technique} is skipped: {reason}" for technique, reason in made.skipped.items())
    if requested(variant) and not requested(made.applied):
        return False, skipped
    return True, f"can run here, but {skipped}" if skipped else "can run here"


def _parsed(name: str, values: Mapping[str, Any]) -> Variant:
    return parse({"compare": {"baseline": name}, "variants": {name: dict(values)}}).variants[name]


def editor() -> YAML:
    """Return a reader and writer of YAML that keeps comments, order and quotes."""
    round_trip = YAML()
    round_trip.preserve_quotes = True
    round_trip.default_flow_style = None  # new variants take one line
    round_trip.width = 1 << 20
    round_trip.representer.add_representer(type(None), lambda writer, _: writer.represent_scalar(NULL_TAG, "null"))
    return round_trip


def _add(config: Config, variants: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Add ``variants`` after those of params.yaml, and return the names of the new ones."""
    added = [name for name in variants if name not in config.variants]
    for name, values in variants.items():
        if name not in added and config.variants[name] != _parsed(name, values):
            raise ConfigError(
                f"variants.{name}: {PARAMS_FILE} has {config.variants[name].model_dump(exclude_defaults=True)} under "
                f"this name, but the set has {dict(values)}; rename your variant."
            )
    if added:
        edit(lambda params: params["variants"].update({name: dict(variants[name]) for name in added}))
    return added


def edit(change: Callable[[Any], None]) -> None:
    """Apply ``change`` to the content of params.yaml, keeping comments and order, and check the file.

    Raises ConfigError if it cannot be written."""
    file = PARAMS_FILE.resolve()  # if it is a link, write its target, so that the link stays
    if not os.access(file, os.W_OK):
        raise ConfigError(f"{file} cannot be written; make it writable, or copy the change into it yourself.")
    text, written = editor(), StringIO()
    params = text.load(files.read_text(file))
    change(params)
    text.dump(params, written)
    files.write_text(file, written.getvalue())
    load()
