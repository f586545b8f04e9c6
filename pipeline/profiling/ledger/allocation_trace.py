"""What an allocator hands out and gets back while a step runs, and where that is at its highest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["data", "gradients", "activations", "communication"]


@dataclass
class Block:
    """Memory that was handed out while the tape ran."""

    size: int
    kind: Kind
    taken: int
    """How many blocks were handed out before."""
    given_back: int | None = None
    """How many blocks had been handed out when this one came back; None: it is still out."""


class Tape:
    """Blocks in the order in which they were handed out. A key stands for one block at a time, as an address does."""

    def __init__(self) -> None:
        self.held: dict[int, Block] = {}
        self._blocks: list[Block] = []
        self._total = self._peak = self._peak_at = 0
        self._kinds: list[Kind] = ["activations"]

    def take(self, key: int, size: int) -> None:
        block = self.held[key] = Block(size, self._kinds[-1], taken=len(self._blocks))
        self._blocks.append(block)
        self._total += size
        if self._total > self._peak:
            self._peak, self._peak_at = self._total, block.taken

    def give_back(self, key: int) -> None:
        """Nothing happens for a block that was out before the tape ran."""
        block = self.held.pop(key, None)
        if block is not None:
            block.given_back = len(self._blocks)
            self._total -= block.size

    def input(self, arriving: bool) -> None:
        """Whether what is handed out from now on belongs to the input."""
        self._between(arriving, "data")

    def communication(self, begins: bool) -> None:
        """Whether what is handed out from now on is for exchange between ranks; begin and end may be nested."""
        self._between(begins, "communication")

    def gradients(self, keys: Iterable[int]) -> None:
        """These blocks are gradients of parameters now."""
        for key in keys:
            if key in self.held:
                self.held[key].kind = "gradients"

    def at_peak(self, kind: Kind) -> int:
        """Bytes of this kind that were out when all together were most."""
        return sum(
            block.size
            for block in self._blocks[: self._peak_at + 1]
            if block.kind == kind and (block.given_back is None or block.given_back > self._peak_at)
        )

    def _between(self, begins: bool, kind: Kind) -> None:
        if begins:
            self._kinds.append(kind)
        else:
            self._kinds.pop()
