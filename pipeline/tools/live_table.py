"""What ``advise`` and ``try`` share: the minutes that a person allows, and a table that is drawn while they pass."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping

from tqdm import tqdm

from pipeline import processes
from pipeline.comparison.stats import Difference
from pipeline.errors import say
from pipeline.params import check_minutes
from pipeline.report.facts import brief
from pipeline.results.figures import Figure


class LiveTable:
    """The minutes of ``command``, and its table."""

    def __init__(self, command: str, minutes: float) -> None:
        """The ``minutes`` count from the start of the process. Raises ConfigError."""
        check_minutes(minutes)
        self.seconds = 60 * minutes
        self._command, self._started, self._drawn = command, time.monotonic() - processes.age_seconds(), 0

    def left(self, share: float = 1.0) -> float:
        """Return the seconds until this share of the minutes is over."""
        return self._started + share * self.seconds - time.monotonic()

    def show(self, news: str, ratios: Mapping[str, Mapping[Figure, Difference]], out: Mapping[str, str]) -> None:
        """Show what is new, and ratios to the baseline: on a terminal, draw the table again in its place; elsewhere,
        print a line without the arms that are ``out``. ``out``: arm that is not measured any more -> why."""
        if not sys.stdout.isatty():
            known = (f"{name} {in_cells(of)}" for name, of in ratios.items() if name not in out)
            say(f"{self._command}: {'; '.join([news, *known])}")
            return
        rows = {"": [figure.noun for figure in next(iter(ratios.values()), ())]}
        rows |= {name: [*map(brief, of.values()), out.get(name, "")] for name, of in ratios.items()}
        width = max(map(len, rows))
        lines = [f"{self._command}: {news}; {max(0.0, self.left()):.0f} s left"]
        lines += [f"  {name:{width}}" + "".join(f"  {text:24}" for text in texts) for name, texts in rows.items()]
        columns = shutil.get_terminal_size().columns - 1
        with tqdm.external_write_mode(file=sys.stdout):
            sys.stdout.write(f"\x1b[{self._drawn}F\x1b[J" if self._drawn else "")
            say("\n".join(text[:columns] for text in lines))
        self._drawn = len(lines)

    def leave_out(self, name: str, why: str) -> None:
        """Print that an arm is not measured any more, below what is drawn."""
        self.stay()
        say(f"{self._command}: {name}: {why}")

    def stay(self) -> None:
        """Leave what is drawn where it is: other output follows."""
        self._drawn = 0


def in_cells(ratios: Mapping[Figure, Difference]) -> str:
    """Return the ratios on one line."""
    return ", ".join(f"{figure.word} {brief(ratio)}" for figure, ratio in ratios.items())


def dearest(costs: Mapping[str, float], seconds: float, most: int) -> list[str]:
    """Return up to ``most`` arms, the dearest first, without which the others cost no more than ``seconds``.
    ``costs``: arm -> seconds."""
    kept, dear = sorted(costs, key=lambda name: costs[name]), list[str]()
    while kept and len(dear) < most and sum(costs[name] for name in kept) > seconds:
        dear.append(kept.pop())
    return dear
