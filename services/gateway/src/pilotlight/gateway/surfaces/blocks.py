"""An answer as a row of blocks: text and calls of tools, each opened, added to, and closed."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from pilotlight.gateway.openai.answer import Delta

BlockKind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Block:
    """One block, as far as it has come."""

    index: int
    """Which block of the answer."""
    kind: BlockKind
    call: int = 0
    """Which call of the answer, where it is one."""
    name: str = ""
    """The function's, likewise."""
    parts: list[str] = field(default_factory=list[str])

    @property
    def text(self) -> str:
        """All that there is of it: of a call its arguments."""
        return "".join(self.parts)


@dataclass(frozen=True, slots=True)
class Change:
    """What became of a block."""

    what: Literal["opened", "added", "closed"]
    block: Block
    text: str = ""
    """What was added."""


class Blocks:
    """The blocks of one answer. One is open at a time."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None

    def feed(self, delta: Delta) -> list[Change]:
        """Add what some tokens added to the answer."""
        changes: list[Change] = []
        if delta.reasoning:
            changes += self._add("reasoning", delta.reasoning)
        if delta.text:
            changes += self._add("text", delta.text)
        for piece in delta.calls:
            if piece.name is not None:
                changes += self._opened("call", call=piece.index, name=piece.name)
            changes += self._add("call", piece.arguments)
        return changes

    def finish(self) -> list[Change]:
        """The answer has ended."""
        block, self._open = self._open, None
        return [] if block is None else [Change("closed", block)]

    def _add(self, kind: BlockKind, text: str) -> Iterable[Change]:
        changes: list[Change] = []
        if self._open is None or self._open.kind != kind:
            changes += self._opened(kind)
        block = self.all[-1]
        if text:
            block.parts.append(text)
            changes.append(Change("added", block, text))
        return changes

    def _opened(self, kind: BlockKind, *, call: int = 0, name: str = "") -> list[Change]:
        closed = self.finish()
        self._open = Block(len(self.all), kind, call, name)
        self.all.append(self._open)
        return [*closed, Change("opened", self._open)]
