"""What a model thinks before it answers: how families write it, and how it is read from a stream.

::

    <think> first, 2 + 2 </think> It is 4.
           [ reasoning  ]         [ content ]

The tags are dropped, and blanks beside them. What comes out depends on the text alone, not on the
pieces in which it comes.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

_SWITCHES = ("enable_thinking", "thinking", "reasoning_effort")


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """What stands around the reasoning."""

    opening: str
    closing: str


FAMILIES = (
    ReasoningTags("<think>", "</think>"),
    ReasoningTags("[THINK]", "[/THINK]"),
    ReasoningTags("<seed:think>", "</seed:think>"),
    ReasoningTags("\u25c1think\u25b7", "\u25c1/think\u25b7"),
)
"""Qwen3, DeepSeek-R1, GLM-4.5 and most others; Magistral; Seed-OSS; Kimi."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateReasoning:
    """What a chat template knows of reasoning. All of it off: nothing."""

    tags: ReasoningTags | None = None
    switches: tuple[str, ...] = ()
    """Variables by which it is told whether, or how much, the model is to think."""


def template_reasoning(source: str | None) -> TemplateReasoning:
    """What a template's own text says of reasoning."""
    if source is None:
        return TemplateReasoning()
    tags = next((family for family in FAMILIES if family.closing in source), None)
    written = " ".join(re.findall(r"\{[{%](.*?)[}%]\}", source, re.DOTALL))
    code = re.sub(r"'[^']*'|\"[^\"]*\"", "", written)
    switches = tuple(name for name in _SWITCHES if re.search(rf"(?<![\w.]){name}(?!\w)", code))
    return TemplateReasoning(tags=tags, switches=switches)


class _At(StrEnum):
    START = "start"
    REASONING = "reasoning"
    CONTENT = "content"


@dataclass(frozen=True, slots=True)
class Thought:
    """What a text added to an answer."""

    reasoning: str
    content: str


class ReasoningParser:
    """Reads one answer. Only what stands at its beginning is reasoning."""

    def __init__(self, tags: ReasoningTags, *, begun: bool) -> None:
        """Begin an answer.

        Args:
            tags: the family's.
            begun: the prompt ends with the opening tag.
        """
        self._tags = tags
        self._at = _At.REASONING if begun else _At.START
        self._held = ""
        self._blank = True
        """Nothing but blanks has come of the part that is read."""

    @property
    def thinking(self) -> bool:
        """The next text is reasoning, as far as is known."""
        return self._at is _At.REASONING

    def feed(self, text: str) -> Thought:
        """Add text; get what can be shown now."""
        self._held += text
        reasoning = ""
        if self._at is _At.START:
            begun = self._held.lstrip()
            if begun.startswith(self._tags.opening):
                self._at = _At.REASONING
                self._held = begun.removeprefix(self._tags.opening)
            elif not self._tags.opening.startswith(begun):
                self._at, self._blank = _At.CONTENT, False
        if self._at is _At.REASONING:
            reasoning = self._think()
        content = self._shown(self._take()) if self._at is _At.CONTENT else ""
        return Thought(reasoning, content)

    def finish(self) -> Thought:
        """The answer has ended: what was held back."""
        rest = self._take()
        if self._at is _At.REASONING:
            return Thought(self._shown(rest).rstrip(), "")
        return Thought("", rest if self._at is _At.START else self._shown(rest))

    def _think(self) -> str:
        before, closing, after = self._held.partition(self._tags.closing)
        if closing:
            reasoning = self._shown(before.rstrip())
            self._at, self._held, self._blank = _At.CONTENT, after, True
            return reasoning
        # Blanks may stand before the closing tag, and its beginning may be all that came of it.
        kept = len(before) - _overlap(before, self._tags.closing)
        kept = len(before[:kept].rstrip())
        self._held = before[kept:]
        return self._shown(before[:kept])

    def _shown(self, text: str) -> str:
        if self._blank:
            text = text.lstrip()
            self._blank = not text
        return text

    def _take(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, tag: str) -> int:
    """How many of a text's last characters may begin a tag."""
    longest = min(len(text), len(tag) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(tag[:size])), 0)
