"""The command ``techniques``: print the catalogue of techniques in a terminal or as JSON, or write its page of the
documentation."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from pipeline.errors import ConfigError, say
from pipeline.pages import render
from pipeline.params import CATALOGUE, Entry, Machine, entries, exclusions

CHANGES = {
    "nothing": "the trained weights are the same, bit for bit",
    "rounding": "the same mathematics, rounded differently, unless a layer mixes samples, as BatchNorm does",
    "statistics": "other gradients or samples, so results agree only on average over several runs, if at all",
}

PROCESSES = "processes: auto (one per GPU, or two without GPUs), or a number"


def show(machine: Machine, words: Sequence[str], *, as_json: bool) -> None:
    """Print the techniques that match all ``words``; without words, print one line for each technique.

    A single word that is a technique's name finds only this technique. Raises ConfigError if no technique matches.
    """
    installed = entries()
    matching = [entry for entry in installed if all(_is_about(entry, word) for word in words)]
    matching = [entry for entry in matching if [entry.name] == list(words)] or matching
    if not matching:
        raise ConfigError(
            f"techniques: found nothing about {' '.join(words)!r}; there are: {', '.join(e.name for e in installed)}."
        )
    if as_json:
        print(json.dumps([_described(entry, machine) for entry in matching], indent=2))  # noqa: T201
        return
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    say("\n".join((_details if words else _overview)(matching, machine, width)).rstrip("\n"))


def markdown() -> str:
    """Return the content of ``docs/techniques.md``."""
    return render("techniques.md", changes=CHANGES, groups=_grouped(CATALOGUE), name=_name, exclusions=exclusions)


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
        "excludes": dict(sorted(exclusions(entry, entries()).items())),
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


def _overview(techniques: Sequence[Entry], machine: Machine, width: int) -> Iterator[str]:
    """Yield one line for each technique: its name, whether this machine can run it, and what it does."""
    column = max(len(entry.name) for entry in techniques)
    for group, members in _grouped(techniques):
        yield group
        for entry in members:
            suitability, _ = _here(entry, machine)
            line = f"  {entry.name:{column}}  {suitability:6}  {entry.does}"
            yield line if len(line) <= width else f"{line[: width - 3].rstrip()}..."
        yield ""
    yield "To see one technique in detail, run: python -m pipeline techniques NAME (or a word such as AMP)"


def _details(techniques: Sequence[Entry], machine: Machine, width: int) -> Iterator[str]:
    installed = entries()
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
            for label, text in texts.items():
                if text:
                    wrapped = textwrap.wrap(text, width - 14, break_on_hyphens=False)
                    yield f"    {label:10}" + f"\n{' ' * 14}".join(wrapped)
            yield ""
