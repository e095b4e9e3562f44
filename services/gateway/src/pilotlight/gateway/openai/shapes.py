"""How completions look: what chat and plain completions differ in."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec

from pilotlight.gateway.openai.answer import Delta
from pilotlight.gateway.schema.replies import PlacedToken, Usage


class Whole(msgspec.Struct, frozen=True, gc=False):
    """A choice in one piece."""

    index: int
    delta: Delta
    finish_reason: str
    placed: list[dict[str, PlacedToken] | None] | None = None
    """``prompt_logprobs``, where they were asked for."""


class Shapes(ABC):
    """How one kind of completion looks."""

    @abstractmethod
    def opening(self, index: int) -> object | None:
        """First event of a choice's stream, before any text; None for no such event."""

    @abstractmethod
    def chunk(self, index: int, delta: Delta) -> object:
        """An event with a choice's text."""

    @abstractmethod
    def closing(self, index: int, finish_reason: str) -> object:
        """The event that says why a choice ended."""

    @abstractmethod
    def usage_chunk(self, usage: Usage) -> object:
        """The last event, for requests that ask for usage."""

    @abstractmethod
    def whole(self, choices: Sequence[Whole], usage: Usage) -> object:
        """The answer in one piece."""
