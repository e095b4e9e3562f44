"""How a chat looks: a bar while the model loads, the answer as it comes, what it took."""

import re
import sys
from types import TracebackType
from typing import Self

from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from pilotlight.cli.chat_stream import Loading, Part, Text
from pilotlight.cli.conversation import Answer
from pilotlight.cli.output import console, errors

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What could move a terminal's cursor or set its title; new lines and tabs may stay."""
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def printable(text: str) -> str:
    """A model's text, without what would command a terminal."""
    return _UNPRINTABLE.sub("", text)


class AnswerView:
    """Shows one answer while it comes; the bar is on standard error, where there is a terminal."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._dim = False
        self._column = 0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[told]}"),
            TimeElapsedColumn(),
            console=errors,
            transient=True,
            disable=not errors.is_terminal,
        )
        self._bar: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()
        self._shade(dim=False)
        if self._column:
            sys.stdout.write("\n")
        sys.stdout.flush()

    def show(self, part: Part) -> None:
        """The next part of the answer."""
        if isinstance(part, Loading):
            self._load(part)
        elif isinstance(part, Text):
            self._progress.stop()
            self._write(part)

    def _load(self, part: Loading) -> None:
        if self._bar is None:
            self._progress.start()
            self._bar = self._progress.add_task(
                f"loading {escape(self._model)}", total=None, told=""
            )
        told = part.phase
        if part.progress is not None:
            told += f" {part.progress:.0%}"
        if part.ahead:
            told += f", {part.ahead} ahead"
        self._progress.update(
            self._bar,
            total=None if part.progress is None else 1.0,
            completed=part.progress or 0.0,
            told=told,
        )

    def _write(self, part: Text) -> None:
        text = printable(part.text)
        if not part.reasoning and self._dim and self._column:
            text = "\n\n" + text.lstrip("\n")
        self._shade(dim=part.reasoning)
        sys.stdout.write(text)
        sys.stdout.flush()
        if text:
            self._column = len(text) - text.rfind("\n") - 1

    def _shade(self, *, dim: bool) -> None:
        if dim != self._dim and console.is_terminal:
            sys.stdout.write(_DIM if dim else _PLAIN)
        self._dim = dim


def told_figures(answer: Answer) -> str:
    """One line on what an answer took."""
    told = [f"{answer.prompt_tokens} + {answer.output_tokens} tokens"]
    if answer.ttft_s is not None:
        told.append(f"first after {answer.ttft_s * 1000:,.0f} ms{' (cold)' if answer.cold else ''}")
    if (rate := answer.tokens_per_s) is not None:
        told.append(f"{rate:,.1f} tokens/s")
    if answer.finish_reason == "length":
        told.append("cut short by its limit")
    if answer.trace_id:
        told.append(f"pilotlight trace {answer.request_id or answer.trace_id}")
    return "; ".join(told)
