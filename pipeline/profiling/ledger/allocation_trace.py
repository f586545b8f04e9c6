"""Record allocations and frees while a step runs, and find the peak of the allocated bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["data", "gradients", "activations", "communication"]


@dataclass
class Block:
    """Memory that was allocated while the trace ran."""

    size: int
    kind: Kind
    taken: int
    """Number of blocks allocated before this block."""
    given_back: int | None = None
    """Number of blocks that had been allocated when this block was freed; None if it is not freed."""


class AllocationTrace:
    """Blocks in the order of their allocation. A key, such as an address, stands for one block at a time."""

    def __init__(self) -> None:
        self.held: dict[int, Block] = {}
        self._blocks: list[Block] = []
        self._total = self._peak = self._peak_at = 0
        self._kinds: list[Kind] = ["activations"]

    def allocate(self, key: int, size: int) -> None:
        block = self.held[key] = Block(size, self._kinds[-1], taken=len(self._blocks))
        self._blocks.append(block)
        self._total += size
        if self._total > self._peak:
            self._peak, self._peak_at = self._total, block.taken

    def free(self, key: int) -> None:
        """Free a block. A block that was allocated before the trace began is ignored."""
        block = self.held.pop(key, None)
        if block is not None:
            block.given_back = len(self._blocks)
            self._total -= block.size

    def section(self, kind: Kind, *, begins: bool) -> None:
        """Begin or end a section in which allocated blocks are of this kind; sections may nest."""
        if begins:
            self._kinds.append(kind)
        else:
            self._kinds.pop()

    def gradients(self, keys: Iterable[int]) -> None:
        """Mark these blocks as gradients of parameters."""
        for key in keys:
            if key in self.held:
                self.held[key].kind = "gradients"

    def at_peak(self, kind: Kind) -> int:
        """Return the bytes of this kind that were allocated when the total was at its peak."""
        return sum(
            block.size
            for block in self._blocks[: self._peak_at + 1]
            if block.kind == kind and (block.given_back is None or block.given_back > self._peak_at)
        )
