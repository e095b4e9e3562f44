"""``pilotlight run`` and ``chat``: one answer, or a conversation until ``/bye``."""

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass

from pilotlight.cli.chat_view import AnswerView, told_figures
from pilotlight.cli.conversation import Answer, Conversation
from pilotlight.cli.inference import InferenceClient
from pilotlight.cli.output import console, emit_json, errors, show_error
from pilotlight.common.clock import Clock
from pilotlight.common.errors import PilotlightError

MAX_PROMPT_CHARS = 1_000_000
QUOTES = '"""'
HELP = """/help           this list
/clear          forget what was said
/system TEXT    instruct the model; without a text, show how it is instructed
/stats          what each answer took: on, off
/show           the conversation's model, and what its last answer took
/bye            leave (Ctrl-D does, too)
Ctrl-C leaves an answer where it is. Lines between \"\"\" and \"\"\" are one message."""

Read = Callable[[str], str]
"""Reads a line after a prompt; ``EOFError`` where there are no more."""


def answer_once(
    client: InferenceClient,
    talk: Conversation,
    prompt: str,
    clock: Clock,
    *,
    verbose: bool = False,
    as_json: bool = False,
) -> int:
    """Answer one prompt.

    Args:
        client: Asks the gateway.
        talk: With whom, and how.
        prompt: What is asked.
        clock: Tells how long it took.
        verbose: Say that, too.
        as_json: Print JSON in place of text, once the answer is there.
    """
    if as_json:
        emit_json(talk.ask(client, prompt, lambda _: None, clock).figures())
        return 0
    answer = _shown(client, talk, prompt, clock)
    if verbose:
        errors.print(told_figures(answer), style="dim", markup=False, soft_wrap=True)
    return 0 if answer.finish_reason else 130


def _shown(client: InferenceClient, talk: Conversation, prompt: str, clock: Clock) -> Answer:
    with AnswerView(talk.model) as view:
        return talk.ask(client, prompt, view.show, clock)


@dataclass
class Session:
    """A conversation at a terminal."""

    client: InferenceClient
    talk: Conversation
    clock: Clock
    read: Read
    verbose: bool = False
    last: Answer | None = None

    def run(self) -> int:
        """Read and answer until the user leaves."""
        console.print(
            f"[bold]{self.talk.model}[/]: /help lists commands, /bye leaves", highlight=False
        )
        while True:
            try:
                text = self._message()
            except EOFError:
                console.print()
                return 0
            except KeyboardInterrupt:
                console.print("\n(/bye or Ctrl-D leaves)")
                continue
            if text.startswith("/"):
                if not self._obey(text):
                    return 0
            elif text:
                self._answer(text)

    def _message(self) -> str:
        line = self.read(">>> ").strip()
        if not line.startswith(QUOTES):
            return line[:MAX_PROMPT_CHARS]
        lines = [line.removeprefix(QUOTES)]
        while not lines[-1].rstrip().endswith(QUOTES):
            lines.append(self.read("... "))
        return "\n".join(lines).rstrip().removesuffix(QUOTES).strip("\n")[:MAX_PROMPT_CHARS]

    def _answer(self, text: str) -> None:
        try:
            self.last = _shown(self.client, self.talk, text, self.clock)
        except PilotlightError as error:
            show_error(error)
            return
        if self.verbose or self.last.cold:
            console.print(told_figures(self.last), style="dim", markup=False, soft_wrap=True)

    def _obey(self, text: str) -> bool:
        """Carry out a command; whether the conversation goes on."""
        command, _, rest = text.partition(" ")
        match command:
            case "/bye" | "/exit" | "/quit":
                return False
            case "/help" | "/?":
                console.print(HELP, markup=False)
            case "/clear":
                self.talk.said.clear()
                console.print("forgotten")
            case "/system":
                self.talk.system = rest.strip() or self.talk.system
                console.print(self.talk.system or "no instruction", markup=False, soft_wrap=True)
            case "/stats":
                self.verbose = not self.verbose
                console.print(f"figures are {'on' if self.verbose else 'off'}")
            case "/show":
                last = f"; last: {told_figures(self.last)}" if self.last is not None else ""
                turns = len(self.talk.said) // 2
                console.print(
                    f"{self.talk.model}, {turns} turns{last}", markup=False, soft_wrap=True
                )
            case _:
                console.print(f"{command} is no command; /help lists them", markup=False)
        return True


def read_line(prompt: str) -> str:
    """A line of the terminal, with the keys that edit and repeat lines.

    Raises:
        EOFError: there are no more.
    """
    # What it does for ``input`` it does by being imported.
    with contextlib.suppress(ImportError):
        import readline as _  # noqa: F401
    return input(prompt)


def piped() -> str:
    """What stands in standard input, where that is no terminal."""
    return "" if sys.stdin.isatty() else sys.stdin.read(MAX_PROMPT_CHARS).strip()
