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
    found = [entry for entry in installed if all(_is_about(entry, word) for word in words)]
    found = [entry for entry in found if [entry.name] == list(words)] or found
    if not found:
        raise ConfigError(
            f"techniques: found nothing about {' '.join(words)!r}; there are: {', '.join(e.name for e in installed)}."
        )
    if as_json:
        print(json.dumps([_described(entry, machine) for entry in found], indent=2))  # noqa: T201
        return
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    say("\n".join((_details if words else _overview)(found, machine, width)).rstrip("\n"))


def markdown() -> str:
    """Return the content of ``docs/techniques.md``."""
    parts = [
        "# Techniques",
        "",
        "Each technique is one line of a variant in `params.yaml`. `python -m pipeline techniques` says which "
        "techniques this machine can run; `python -m pipeline techniques AMP` finds techniques by the names that "
        "people search for. `make docs` writes this page.",
        "",
        "If a technique's name differs from its setting, the name follows in brackets. *Cannot run with* lists names.",
        "",
        "What a technique changes, as the tests and `python -m pipeline verify` check it:",
        "",
        *(f"- **{word}**: {meaning}." for word, meaning in CHANGES.items()),
    ]
    for group, members in _grouped(CATALOGUE):
        parts += ["", f"## {group}", ""]
        parts += ["| `params.yaml` | What it does | When it pays | What it costs | Changes | Cannot run with |"]
        parts += ["| :-- | :-- | :-- | :-- | :-- | :-- |"]
        for entry in members:
            cells = (
                f"`{entry.setting}`{_name(entry, '`')}",
                f"{entry.does}. ({entry.source}.)",
                entry.pays,
                entry.costs,
                entry.changes,
                ", ".join(f"`{name}`" for name in sorted(exclusions(entry))) or "-",
            )
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(parts) + "\n"


def _grouped(found: Iterable[Entry]) -> Iterator[tuple[str, Iterator[Entry]]]:
    return groupby(found, lambda entry: entry.group)


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
    return {
        "name": entry.name,
        "group": entry.group,
        "setting": entry.setting,
        "searched_for": list(entry.searched_for),
        "does": entry.does,
        "pays": entry.pays,
        "costs": entry.costs,
        "source": entry.source,
        "changes": entry.changes,
        "excludes": dict(sorted(exclusions(entry, entries()).items())),
        "why_not_here": why_not,
        "why_not_values_here": {
            str(value): reason for value, refuse in entry.why_not_value.items() if (reason := refuse(machine, on_gpu))
        },
        "emulated_here": entry.emulated(machine, on_gpu),
    }


def _here(entry: Entry, machine: Machine) -> str:
    """Return whether this machine can run the technique and, if it cannot, why."""
    described = _described(entry, machine)
    if described["why_not_here"]:
        return f"no: {described['why_not_here']}."
    if described["emulated_here"]:
        return f"slowly: {described['emulated_here']}."
    values = [f"not {value}: {reason}" for value, reason in described["why_not_values_here"].items()]
    return f"yes, but {'; '.join(values)}." if values else "yes"


def _overview(found: Sequence[Entry], machine: Machine, width: int) -> Iterator[str]:
    """Yield one line for each technique: its name, whether this machine can run it, and what it does."""
    column = max(len(entry.name) for entry in found)
    for group, members in _grouped(found):
        yield group
        for entry in members:
            here = _here(entry, machine).partition(":")[0].partition(",")[0]
            line = f"  {entry.name:{column}}  {here:6}  {entry.does}"
            yield line if len(line) <= width else f"{line[: width - 3].rstrip()}..."
        yield ""
    yield "To see one technique in detail, run: python -m pipeline techniques NAME (or a word such as AMP)"


def _details(found: Sequence[Entry], machine: Machine, width: int) -> Iterator[str]:
    installed = entries()
    for group, members in _grouped(found):
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
                "here": _here(entry, machine),
                "also": ", ".join(entry.searched_for),
            }
            for label, text in texts.items():
                if text:
                    wrapped = textwrap.wrap(text, width - 14, break_on_hyphens=False)
                    yield f"    {label:10}" + f"\n{' ' * 14}".join(wrapped)
            yield ""
