"""A streamed answer, line by line: what a client of ``/v1`` sees between its request and the end.

Pure: lines in, parts of the answer out. The command line's chats and its load generator read
streams with it.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pilotlight.cli.gateway_errors import gateway_error
from pilotlight.common.errors import TransientError

_LOADING = re.compile(
    r": pilotlight queue=(\d+) phase=(\w+)(?: progress=([0-9.]+))? elapsed=([0-9.]+)s"
)
_DATA = "data: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """The request is held: its model is not ready."""

    ahead: int
    """Requests before it."""
    phase: str
    progress: float | None
    """Share of the parameters that is fetched; None: that is not told in this phase."""
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """The next piece of the answer."""

    text: str
    reasoning: bool = False
    """The model thinks; its answer comes after that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Why the answer ends."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """How many tokens there were."""

    prompt_tokens: int
    output_tokens: int


Part = Loading | Text | Finish | Counted


class AnswerLines:
    """Reads the lines of one stream."""

    def __init__(self) -> None:
        self._failed = False
        self.ended = False
        """The server said that this is all of it."""

    def read(self, line: str) -> tuple[Part, ...]:
        """What one line adds.

        Raises:
            PilotlightError: the stream ends with an error.
        """
        if line.startswith(":"):
            found = _LOADING.match(line)
            return (_loading(found),) if found is not None else ()
        if line == "event: error":
            self._failed = True
            return ()
        if not line.startswith(_DATA):
            return ()
        data = line.removeprefix(_DATA)
        if data == "[DONE]":
            self.ended = True
            return ()
        try:
            body = json.loads(data)
        except ValueError as error:
            raise TransientError(
                f"the stream has an event that is no JSON: {data[:200]}"
            ) from error
        if self._failed or "error" in body:
            told = body.get("error", {})
            raise gateway_error(str(told.get("code")), str(told.get("message")))
        return _parts(body)


def _loading(found: re.Match[str]) -> Loading:
    ahead, phase, progress, elapsed = found.groups()
    return Loading(
        ahead=int(ahead),
        phase=phase,
        progress=float(progress) if progress is not None else None,
        elapsed_s=float(elapsed),
    )


def _parts(body: Mapping[str, Any]) -> tuple[Part, ...]:
    """Of an event of a chat, or of a plain completion."""
    found: list[Part] = []
    for choice in body.get("choices", ()):
        delta = choice.get("delta", choice)
        if thought := delta.get("reasoning_content"):
            found.append(Text(text=thought, reasoning=True))
        if text := delta.get("content") or delta.get("text"):
            found.append(Text(text=text))
        if reason := choice.get("finish_reason"):
            found.append(Finish(reason=reason))
    if usage := body.get("usage"):
        found.append(
            Counted(prompt_tokens=usage["prompt_tokens"], output_tokens=usage["completion_tokens"])
        )
    return tuple(found)
