"""What params.yaml may hold: the commands ``techniques``, which prints the catalogue, also as a page of the
documentation, and ``variants``, which prints the sets of ready-made variants and adds them.

A set is a file in the folder ``variants/`` of the current directory or, if there is no such folder, of the project.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import StringIO
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from pipeline import files, params
from pipeline.environment.imports import PACKAGE
from pipeline.errors import ConfigError, hanging, say
from pipeline.pages import render
from pipeline.params import CATALOGUE, PARAMS_FILE, Config, Entry, Machine, Variant, exclusions
from pipeline.params.loading import read_yaml
from pipeline.plans import Plan, plan

CHANGES = {
    "nothing": "the trained weights are the same, bit for bit",
    "rounding": "the same mathematics, rounded differently, unless a layer mixes samples, as BatchNorm does",
    "statistics": "other gradients or samples, so results agree only on average over several runs, if at all",
}

PROCESSES = "processes: auto (one per GPU, or two without GPUs), or a number"
PROJECT = next(folder for folder in (PACKAGE / "project", PACKAGE.parent) if folder.is_dir())
"""Directory of the files that the project ships: ``project`` in an installed package (see pyproject.toml), or the
checkout."""
FOLDER = Path("variants")
NULL_TAG = "tag:yaml.org,2002:null"


def show_techniques(machine: Machine, words: Sequence[str], *, as_json: bool) -> None:
    """Print the techniques that match all ``words``; without words, print one line for each technique.

    A single word that is a technique's name finds only this technique. Raises ConfigError if no technique matches.
    """
    installed = params.entries()
    matching = [entry for entry in installed if all(_is_about(entry, word) for word in words)]
    matching = [entry for entry in matching if [entry.name] == list(words)] or matching
    if not matching:
        raise ConfigError(
            f"techniques: found nothing about {' '.join(words)!r}; there are: {', '.join(e.name for e in installed)}."
        )
    if as_json:
        print(json.dumps([_described(entry, machine) for entry in matching], indent=2))  # noqa: T201
        return
    say("\n".join((_details if words else _overview)(matching, machine)).rstrip("\n"))


def markdown() -> str:
    """Return the content of ``docs/techniques.md``."""
    return render("techniques.md", changes=CHANGES, groups=_grouped(CATALOGUE), name=_name, excluded=_excluded)


def _excluded(entry: Entry) -> list[str]:
    """Return the names of the techniques with which this one is declared to be impossible."""
    return sorted(other.name for other in CATALOGUE if entry.excluding(other) or other.excluding(entry))


def _grouped(techniques: Iterable[Entry]) -> Iterator[tuple[str, Iterator[Entry]]]:
    return groupby(techniques, lambda entry: entry.group)


def _name(entry: Entry, quote: str = "") -> str:
    """Return, in brackets, the name by which other techniques exclude this one; empty if the setting contains the
    name."""
    return "" if entry.name in entry.setting else f" ({quote}{entry.name}{quote})"


def _is_about(entry: Entry, word: str) -> bool:
    texts = (entry.name, entry.setting, entry.source, *entry.searched_for)
    return any(_plain(word) in _plain(text) for text in texts)


def _plain(text: str) -> str:
    return "".join(character for character in text.lower() if character.isalnum())


def _described(entry: Entry, machine: Machine) -> dict[str, Any]:
    on_gpu = machine.gpus > 0
    why_not = entry.why_not(machine, on_gpu)
    if machine.gpus == 1 and (entry.key == "parallelism" or entry.needs):
        why_not = "there is only one GPU, so the work is not shared"
    texts = {"name", "group", "searched_for", "does", "pays", "costs", "source", "changes"}
    return entry.model_dump(include=texts) | {
        "setting": entry.setting,
        "excludes": dict(sorted(exclusions(entry, params.entries()).items())),
        "why_not_here": why_not,
        "why_not_values_here": {
            value: reason for value, refuse in entry.why_not_value.items() if (reason := refuse(machine, on_gpu))
        },
        "emulated_here": entry.emulated(machine, on_gpu),
    }


def _here(entry: Entry, machine: Machine) -> tuple[str, str]:
    """Return whether this machine can run the technique ("yes", "slowly" or "no"), and the sentence's rest, which says
    why not."""
    described = _described(entry, machine)
    if described["why_not_here"]:
        return "no", f": {described['why_not_here']}."
    if described["emulated_here"]:
        return "slowly", f": {described['emulated_here']}."
    values = [f"not {value}: {reason}" for value, reason in described["why_not_values_here"].items()]
    return "yes", f", but {'; '.join(values)}." if values else ""


def _overview(techniques: Sequence[Entry], machine: Machine) -> Iterator[str]:
    """Yield one line for each technique: its name, whether this machine can run it, and what it does."""
    column, width = max(len(entry.name) for entry in techniques), shutil.get_terminal_size((100, 24)).columns
    for group, members in _grouped(techniques):
        yield group
        for entry in members:
            suitability, _ = _here(entry, machine)
            line = f"  {entry.name:{column}}  {suitability:6}  {entry.does}"
            yield line if len(line) <= width else f"{line[: width - 3].rstrip()}..."
        yield ""
    yield "To see one technique in detail, run: python -m pipeline techniques NAME (or a word such as AMP)"


def _details(techniques: Sequence[Entry], machine: Machine) -> Iterator[str]:
    installed = params.entries()
    for group, members in _grouped(techniques):
        yield f"{group}\n"
        for entry in members:
            yield f"  {entry.setting}{_name(entry)}"
            texts = {
                "does": f"{entry.does}.",
                "pays": f"{entry.pays}.",
                "costs": f"{entry.costs}.",
                "changes": f"{entry.changes}: {CHANGES[entry.changes]}.",
                "excludes": "; ".join(f"{name} ({why})" for name, why in sorted(exclusions(entry, installed).items())),
                "with": PROCESSES if entry.key == "parallelism" else "",
                "here": "".join(_here(entry, machine)),
                "also": ", ".join(entry.searched_for),
            }
            yield from (hanging(f"    {label:10}", text) for label, text in texts.items() if text)
            yield ""


def show_variants(machine: Machine, name: str | None, *, add: bool) -> None:
    """Print all sets. If the ``name`` of a set is given, print its variants instead, and whether each can run here; for
    the name of a technique, a variant with it. With ``add``, also add those that can run here to params.yaml.

    Raises ConfigError if there is no such set. With ``add``, also raises it if params.yaml has a different variant of
    the same name.
    """
    folder = FOLDER if FOLDER.is_dir() else PROJECT / FOLDER
    if name is None:
        for path in sorted(folder.glob("*.yaml")):
            say(hanging(f"{path.stem:15}", f"{_about(path)}\n{', '.join(_variants_in(path))}"))
        return
    path = folder / f"{name}.yaml"
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    named = {alias: entry for entry in params.entries() for alias in (entry.name, entry.setting.replace(": ", "="))}
    if name in known:
        chosen = _variants_in(path)
    elif entry := named.get(name):
        needed = {"parallelism": entry.needs[0]} if entry.needs else {}
        chosen = {entry.name: YAML(typ="safe").load(entry.setting) | needed}
    else:
        sets = f"the name of a set: {', '.join(known)}; or of a technique, such as bf16"
        raise ConfigError(f"variants: found {name!r}; expected {sets}.")
    config = params.load()
    runs = {variant: can_run(config, variant, values, machine) for variant, values in chosen.items()}
    for variant, (_, words) in runs.items():
        say(f"{variant:28} {words}")
    if add:
        added = add_to(config, {variant: values for variant, values in chosen.items() if runs[variant][0]})
        say(f"{PARAMS_FILE}: added {', '.join(added) or 'nothing: it already has all variants that can run here'}")


def _about(path: Path) -> str:
    """Return the comment at the top of the file as one line."""
    lines = files.read_text(path).splitlines()
    return " ".join(line.lstrip("# ") for line in takewhile(lambda line: line.startswith("#"), lines))


def _variants_in(path: Path) -> dict[str, dict[str, Any]]:
    values = read_yaml(path)
    if not isinstance(values, dict) or not values:
        raise ConfigError(f"{path}: found {values!r}; expected variants, each under its name as in {PARAMS_FILE}.")
    params.parse({"compare": {"baseline": next(iter(values))}, "variants": values}, str(path))  # raises ConfigError
    return dict(values)


def can_run(config: Config, name: str, values: Mapping[str, Any], machine: Machine) -> tuple[bool, str]:
    """Return False and the reason if the variant cannot run here, or if it has techniques and all are skipped.
    Otherwise return True and a remark."""
    try:
        made = planned(config, name, values, machine)
    except ConfigError as error:
        return False, str(error)
    skipped = "; ".join(f"{technique} is skipped: {reason}" for technique, reason in made.skipped.items())
    if params.requested(made.requested) and not params.requested(made.applied):
        return False, skipped
    return True, f"can run here, but {skipped}" if skipped else "can run here"


def planned(config: Config, name: str, values: Mapping[str, Any], machine: Machine) -> Plan:
    """Return the plan of the variant ``name`` with these settings. Raises ConfigError if it cannot run here."""
    return plan(config.model_copy(update={"variants": {name: _parsed(name, values)}}), name, machine)


def _parsed(name: str, values: Mapping[str, Any]) -> Variant:
    return params.parse({"compare": {"baseline": name}, "variants": {name: dict(values)}}).variants[name]


def editor() -> YAML:
    """Return a reader and writer of YAML that keeps comments, order and quotes."""
    round_trip = YAML()
    round_trip.preserve_quotes = True
    round_trip.default_flow_style = None  # new variants take one line
    round_trip.width = 1 << 20
    round_trip.representer.add_representer(type(None), lambda writer, _: writer.represent_scalar(NULL_TAG, "null"))
    return round_trip


def add_to(
    config: Config, variants: Mapping[str, Mapping[str, Any]], comments: Mapping[str, str] | None = None
) -> list[str]:
    """Add ``variants`` after those of params.yaml, each under its comment, and return the names of the new ones."""
    added = [name for name in variants if name not in config.variants]
    for name, values in variants.items():
        if name not in added and config.variants[name] != _parsed(name, values):
            raise ConfigError(
                f"variants.{name}: {PARAMS_FILE} has {config.variants[name].model_dump(exclude_defaults=True)} under "
                f"this name, but the set has {dict(values)}; rename your variant."
            )
    if added:

        def change(document: Any) -> None:
            for name in added:
                document["variants"][name] = dict(variants[name])
                if text := (comments or {}).get(name):
                    document["variants"].yaml_set_comment_before_after_key(name, before=text, indent=2)

        edit(change)
    return added


def edit(change: Callable[[Any], None]) -> None:
    """Apply ``change`` to the content of params.yaml, keeping comments and order, and check the file.

    Raises ConfigError if it cannot be written."""
    file = PARAMS_FILE.resolve()  # if it is a link, write its target, so that the link stays
    if not os.access(file, os.W_OK):
        raise ConfigError(f"{file} cannot be written; make it writable, or copy the change into it yourself.")
    text, written = editor(), StringIO()
    document = text.load(files.read_text(file))
    change(document)
    text.dump(document, written)
    files.write_text(file, written.getvalue())
    params.load()
