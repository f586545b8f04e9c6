"""A table that a terminal shows while its figures change."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence

from tqdm import tqdm

from pipeline.errors import say


class LiveTable:
    """The table of ``command``, drawn again in its place on a terminal; elsewhere, one line tells what is new."""

    def __init__(self, command: str) -> None:
        self._command, self._drawn = command, 0

    def show(self, news: str, seconds: float, rows: Mapping[str, Sequence[str]], line: Sequence[str]) -> None:
        """Show what is new. ``seconds``: the time that is left. ``rows``: first cell -> the others, the heads first.
        ``line``: what the line says after the news."""
        if not sys.stdout.isatty():
            say(f"{self._command}: {'; '.join([news, *line])}")
            return
        width = max(map(len, rows))
        lines = [f"{self._command}: {news}; {max(0.0, seconds):.0f} s left"]
        lines += [f"  {name:{width}}" + "".join(f"  {text:24}" for text in texts) for name, texts in rows.items()]
        columns = shutil.get_terminal_size().columns - 1
        with tqdm.external_write_mode(file=sys.stdout):
            sys.stdout.write(f"\x1b[{self._drawn}F\x1b[J" if self._drawn else "")
            say("\n".join(text[:columns] for text in lines))
        self._drawn = len(lines)

    def stay(self) -> None:
        """Leave what is drawn where it is: other output follows."""
        self._drawn = 0
