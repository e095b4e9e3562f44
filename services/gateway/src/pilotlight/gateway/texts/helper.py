"""A text helper: ``python -m pilotlight.gateway.texts.helper FD MEMORY_BYTES``.

It ends when the gateway closes the socket.

One thread, one job after the other; jobs that came together are answered together. What a job runs
is foreign code: it may panic, take all the memory it is allowed, or work until the kernel ends it.
The gateway takes that for the job's fault and starts another helper.
"""

import contextlib
import ctypes
import gc
import os
import resource
import signal
import socket
import sys
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec

from pilotlight.common.clock import Clock, SystemClock
from pilotlight.common.errors import (
    BadRequest,
    ContextTooLong,
    PilotlightError,
    TextFailed,
    TooLarge,
)
from pilotlight.common.messages.codec import encode_json
from pilotlight.gateway.schema.decoding import decode_body
from pilotlight.gateway.schema.kinds import KINDS
from pilotlight.gateway.schema.requests import ChatRequest, CompletionRequest
from pilotlight.gateway.schema.sizes import check_rest, check_sizes
from pilotlight.gateway.texts.frames import (
    HEADER_BYTES,
    Chat,
    Completion,
    Describe,
    Described,
    Encoded,
    Failed,
    Give,
    Hello,
    Job,
    Made,
    Make,
    Missing,
    Read,
    Ready,
    Reply,
    Request,
    Several,
    encoded,
    header,
    header_of,
    job_of,
)
from pilotlight.gateway.texts.model_text import facts_of
from pilotlight.gateway.texts.several import encode_several
from pilotlight.policy.ids import Digest
from pilotlight.text.bundle import TextBundle, bundle_from_files, decode, encode
from pilotlight.text.template import ChatTemplate
from pilotlight.text.tokenizer import TextTokenizer

KEPT_TEXTS = 64
"""Models of which template and tokenizer are kept; fewer where they are large."""
KEPT_SHARE = 0.5
"""Of the memory a job may take: what is kept takes no more."""
LEAST_CPU_S = 0.001
"""Of a job: a timer of none would never end it."""
NICENESS = 5
"""Streams go before prompts."""
READ_BYTES = 64 * 1024
"""At a time, of what is not longer."""
CHECK_SIZE_TOKENS = 500_000
"""A prompt of fewer tokens fits the bus in any case."""
_PR_SET_PDEATHSIG = 1
_PAGE_BYTES = resource.getpagesize()
_NOTHING_TO_READ: dict[type, dict[str, object]] = {
    ChatRequest: {"messages": []},
    CompletionRequest: {"prompt": ""},
}

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Text:
    """A model's template and tokenizer, ready to work."""

    bundle: TextBundle
    tokenizer: TextTokenizer
    template: ChatTemplate
    bytes: int
    """About what it takes."""


class Helper:
    """Does jobs for one gateway."""

    def __init__(self, connection: socket.socket, clock: Clock, memory_bytes: int) -> None:
        self._connection = connection
        self._clock = clock
        self._memory_bytes = memory_bytes
        self._sizes = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._start_bytes = self._address_space_bytes()
        self._texts: OrderedDict[Digest, _Text] = OrderedDict()
        self._refused: Reply | None = None
        """Why the bundle that was given last cannot be used."""
        self._room = bytearray(READ_BYTES)
        self._got, self._at = b"", 0
        """What was read last, and how far it is worked off."""
        self._answers: list[bytes] = []
        """Not sent yet: jobs that came together are answered together."""

    def run(self) -> None:
        """Serve until the gateway is gone."""
        while head := self._exactly(HEADER_BYTES):
            length, cpu_s = header_of(head)
            message = job_of(self._exactly(length))
            self._limit(cpu_s)
            if isinstance(message, Give):
                self._refused = self._guarded(partial(self._keep, message))
                continue
            reply = encoded(self._refused or self._guarded(partial(self._do, message)))
            self._refused = None
            self._answers += (header(reply, time.process_time()), reply)

    def _exactly(self, count: int) -> bytes:
        """Exactly this many bytes; none when the gateway is gone. Before it waits for some, it says
        what it has.
        """
        data = self._got[self._at : self._at + count]
        self._at += len(data)
        if len(data) == count:
            return data
        if self._answers:
            self._connection.sendall(b"".join(self._answers))
            self._answers.clear()
        whole, got = bytearray(count), len(data)
        view = memoryview(whole)
        view[:got] = data
        while got < count:
            if count - got >= READ_BYTES:
                read = self._connection.recv_into(view[got:])
            else:
                read = self._connection.recv_into(self._room)
                self._got, self._at = bytes(self._room[:read]), min(read, count - got)
                view[got : got + self._at] = self._got[: self._at]
            if not read:
                return b""
            got += min(read, count - got)
        return bytes(whole)

    def _guarded(self, work: Callable[[], R]) -> R | Failed:
        """What foreign code does within this process's bounds, or how it failed."""
        try:
            return work()
        except PilotlightError as error:
            return Failed(code=error.code, message=error.message, param=error.param)
        except MemoryError:
            return Failed(
                code=TooLarge.code,
                message=f"this takes more than {self._memory_bytes >> 20} MiB of memory",
            )
        except Exception as error:  # noqa: BLE001 - foreign code raises what it likes
            return Failed(code=TextFailed.code, message=_said(error))
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            return Failed(code=TextFailed.code, message=_said(error))

    def _limit(self, cpu_s: float) -> None:
        """Gives this job its processor time, and its memory beside what the helper has; all jobs
        together leave little behind.
        """
        # Not ``RLIMIT_CPU`` beside what was used: the kernel holds that against a count of its
        # ticks, which drifts away from what it tells of the use.
        signal.setitimer(signal.ITIMER_PROF, max(cpu_s, LEAST_CPU_S))
        limit_bytes = min(
            self._address_space_bytes() + self._memory_bytes,
            self._start_bytes + 2 * self._memory_bytes,
        )
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, resource.RLIM_INFINITY))

    def _address_space_bytes(self) -> int:
        return int(os.pread(self._sizes, 128, 0).split(None, 1)[0]) * _PAGE_BYTES

    def _do(self, job: Job) -> Reply:
        match job:
            case Hello():
                return Ready()
            case Read():
                return Request(_read(job))
            case Make():
                return self._made(job)
            case Describe():
                text = self._text(job.digest)
                return (
                    Missing()
                    if text is None
                    else Described(facts_of(text.bundle, text.tokenizer, self._clock))
                )
            case Chat() | Completion():
                text = self._text(job.digest)
                return Missing() if text is None else Encoded(_encoded(text, job))
            case Several():
                text = self._text(job.digest)
                return Missing() if text is None else encode_several(text.tokenizer, job)

    def _made(self, job: Make) -> Made:
        bundle = bundle_from_files(job.files)
        data = encode(bundle)
        facts = facts_of(bundle, TextTokenizer(bundle), self._clock)
        return Made(data, facts)

    def _text(self, digest: Digest) -> _Text | None:
        """A model's text, if it is held."""
        if digest in self._texts:
            self._texts.move_to_end(digest)
        return self._texts.get(digest)

    def _keep(self, given: Give) -> None:
        """Load a bundle, and let go of others for it.

        Raises:
            BadCheckpoint: it cannot be used.
        """
        before_bytes = self._address_space_bytes()
        bundle = decode(given.bundle)
        tokenizer = TextTokenizer(bundle)
        template = ChatTemplate(bundle.chat_template, bundle.special_tokens, self._clock)
        size_bytes = max(len(given.bundle), self._address_space_bytes() - before_bytes)
        self._texts[given.digest] = _Text(bundle, tokenizer, template, size_bytes)
        while len(self._texts) > 1 and (
            len(self._texts) > KEPT_TEXTS
            or sum(kept.bytes for kept in self._texts.values()) > KEPT_SHARE * self._memory_bytes
        ):
            self._texts.popitem(last=False)


def _read(job: Read) -> bytes:
    """A body, decoded, checked, and encoded so that the gateway can take it without much work.

    Raises:
        BadRequest: it is not what the API takes.
    """
    kind = KINDS[job.kind]
    request = decode_body(job.body, kind)
    check_sizes(request)
    try:
        if nothing := _NOTHING_TO_READ.get(kind):
            check_rest(msgspec.structs.replace(request, **nothing))
        return msgspec.msgpack.encode(request)
    except OverflowError as error:
        raise BadRequest("the body holds a number beyond 64 bits") from error


def _encoded(text: _Text, job: Chat | Completion) -> bytes:
    """Token ids of a prompt.

    Raises:
        BadRequest: the template does not take these messages, or there is nothing to encode.
        ContextTooLong: the prompt is longer than the model's context.
        MessageTooLarge: it is longer than the bus takes.
    """
    if isinstance(job, Chat):
        asked = job.conversation
        prompt = text.template.render(
            asked.messages,
            tools=asked.tools,
            add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=asked.continue_final_message,
            variables=asked.variables,
        )
    else:
        prompt = job.prompt
    limit, chat = job.context_tokens, isinstance(job, Chat)
    if len(prompt) > limit and (least := text.tokenizer.bound.least_tokens(prompt)) > limit:
        raise ContextTooLong.by_prompt(limit, least, chat=chat, more=True)
    token_ids = text.tokenizer.encode(prompt, add_special_tokens=job.add_special_tokens)
    if len(token_ids) > limit:
        raise ContextTooLong.by_prompt(limit, len(token_ids), chat=chat)
    if len(token_ids) > CHECK_SIZE_TOKENS:
        # Told now, and not after a cold start.
        encode_json(token_ids)
    return array("I", token_ids).tobytes()


def _said(error: BaseException) -> str:
    return f"the model's chat template or tokenizer fails on this: {type(error).__name__}: {str(error)[:500]}"


def main(arguments: Sequence[str]) -> int:
    """Serve one gateway; the exit status."""
    # The gateway's end is this process's end, also in the midst of a job; signals to its whole
    # group are the gateway's to heed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    connection = socket.socket(fileno=int(arguments[0]))
    os.set_inheritable(connection.fileno(), False)
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Panics and aborts of libraries say much there that the gateway says in one line. What is wrong
    # with the helper itself is still shown.
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    gc.freeze()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        Helper(connection, SystemClock(), int(arguments[1])).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
