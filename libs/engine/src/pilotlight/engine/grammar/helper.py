"""The grammar helper: ``python -m pilotlight.engine.grammar.helper FD``.

It ends when the engine closes the socket.

One thread. A grammar that was not seen before is first compiled in a fork, which has bounds on
memory and processor time that the library does not have: what kills the fork would have killed the
helper.
"""

import contextlib
import os
import resource
import select
import socket
import sys
from collections import OrderedDict, deque
from collections.abc import Sequence

from llguidance import LLMatcher

from pilotlight.engine.errors import BadRequest
from pilotlight.engine.grammar.frames import Advance, Close, Frames, Open, ToHelper, Verdict, frame
from pilotlight.engine.grammar.matching import MAX_GRAMMAR_CHARS, Lexicon, compile_grammar
from pilotlight.policy.request import Grammar, Vocabulary

TRIAL_BYTES = 512 * 1024 * 1024
"""Memory that compiling one grammar may take."""
TRIAL_CPU_S = 2
HELPER_BYTES = 4 * 1024 * 1024 * 1024
"""Address space of the helper: what its requests take together. Beyond it the helper ends, and is
replaced."""
TRIALS_AT_ONCE = 2
KEPT_GRAMMARS = 64
KEPT_VOCABULARIES = 8
RECEIVE_BYTES = 256 * 1024
NICENESS = 5
_TRIED = b"ok"


class _Session:
    """One request's matcher, after the output so far."""

    def __init__(self, session: int, lexicon: Lexicon, matcher: LLMatcher) -> None:
        self._session = session
        self._lexicon = lexicon
        self._matcher = matcher
        self._position = 0

    def take(self, token_ids: Sequence[int]) -> Verdict:
        """The output goes on."""
        taken = self._matcher.try_consume_tokens(list(token_ids))
        self._position += len(token_ids)
        mask = (
            b""
            if self._matcher.is_error() or taken < len(token_ids)
            else self._matcher.compute_bitmask()
        )
        if self._matcher.is_error():
            return self._failed(f"the grammar is too complex: {self._matcher.get_error()}")
        if taken < len(token_ids):
            return self._failed(
                f"the output does not follow the grammar after {self._position - len(token_ids) + taken} tokens"
            )
        allowed, accepting = self._lexicon.without_ends(mask), self._matcher.is_accepting()
        complete = not any(allowed)
        if complete and not accepting:
            return self._failed("the model's vocabulary has no token that the grammar allows here")
        return Verdict(
            session=self._session,
            position=self._position,
            allowed=allowed,
            accepting=accepting,
            complete=complete,
        )

    def _failed(self, message: str) -> Verdict:
        return Verdict(
            session=self._session, position=self._position, code=BadRequest.code, message=message
        )


class _Trial:
    """A fork that compiles a grammar."""

    def __init__(self, lexicon: Lexicon, grammar: Grammar) -> None:
        self.read_fd, write_fd = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _try(lexicon, grammar, write_fd)
        os.close(write_fd)

    def result(self) -> str:
        """When the fork has ended: what is wrong with the grammar; empty when nothing is."""
        with contextlib.closing(os.fdopen(self.read_fd, "rb")) as pipe:
            told = pipe.read()
        os.waitpid(self._pid, 0)
        if told == _TRIED:
            return ""
        return told.decode(errors="replace") or (
            f"the grammar is too large: compiling it takes more than {TRIAL_BYTES >> 20} MiB of memory or {TRIAL_CPU_S} s"
        )


def _try(lexicon: Lexicon, grammar: Grammar, write_fd: int) -> None:
    """In the fork: never returns."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            held_bytes = int(file.read().split()[0]) * resource.getpagesize()
        limit_bytes = min(held_bytes + TRIAL_BYTES, HELPER_BYTES)
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
        resource.setrlimit(resource.RLIMIT_CPU, (TRIAL_CPU_S, TRIAL_CPU_S))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # What the library prints when it aborts says nothing new.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        told = _TRIED
        try:
            verdict = _Session(0, lexicon, compile_grammar(lexicon, grammar)).take([])
            told = verdict.message.encode() or _TRIED
        except BadRequest as error:
            told = error.message.encode()
        os.write(write_fd, told[:4096])
    finally:
        os._exit(
            0
        )  # Not the interpreter's own way out: that would close what the helper still has open.


class Helper:
    """Sessions of one engine."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._frames = Frames(ToHelper)
        self._lexicons: OrderedDict[tuple[Vocabulary, int], Lexicon] = OrderedDict()
        self._compiled: OrderedDict[tuple[Vocabulary, int, Grammar], LLMatcher] = OrderedDict()
        """Matchers at the beginning of an output, to be copied."""
        self._sessions: dict[int, _Session] = {}
        self._wanted: set[int] = set()
        """Sessions that were asked for and are not closed."""
        self._waiting: deque[Open] = deque()
        self._trials: dict[int, tuple[_Trial, Open]] = {}

    def run(self) -> None:
        """Serve until the engine is gone."""
        while True:
            # Not select: it takes no descriptor from 1024 on.
            poll = select.poll()
            for descriptor in (self._connection.fileno(), *self._trials):
                poll.register(descriptor, select.POLLIN)
            for fd, _ in poll.poll():
                if fd != self._connection.fileno():
                    self._end_trial(*self._trials.pop(fd))
                    continue
                data = self._connection.recv(RECEIVE_BYTES)
                if not data:
                    return
                for message in self._frames.feed(data):
                    self._obey(message)
            while self._waiting and len(self._trials) < TRIALS_AT_ONCE:
                self._begin(self._waiting.popleft())

    def _obey(self, message: object) -> None:
        match message:
            case Open():
                self._wanted.add(message.session)
                self._waiting.append(message)
            case Advance() if message.session in self._sessions:
                self._say(self._sessions[message.session].take([message.token_id]))
            case Close():
                self._wanted.discard(message.session)
                self._sessions.pop(message.session, None)
            case _:
                pass  # Of a session that could not be opened, or was closed meanwhile.

    def _begin(self, request: Open) -> None:
        """Opens a session at once if its grammar is known, and tries the grammar otherwise."""
        if request.session not in self._wanted:
            return
        try:
            if len(request.grammar.text) > MAX_GRAMMAR_CHARS:
                raise BadRequest(
                    f"the grammar has {len(request.grammar.text)} characters; at most {MAX_GRAMMAR_CHARS} are taken"
                )
            lexicon = self._lexicon(request)
            if (request.vocabulary, request.vocab_size, request.grammar) in self._compiled:
                self._open(request, lexicon)
            else:
                trial = _Trial(lexicon, request.grammar)
                self._trials[trial.read_fd] = (trial, request)
        except BadRequest as error:
            self._refuse(request, error.message)

    def _end_trial(self, trial: _Trial, request: Open) -> None:
        wrong = trial.result()
        if request.session not in self._wanted:
            return
        if wrong:
            self._refuse(request, wrong)
            return
        try:
            self._open(request, self._lexicon(request))
        except BadRequest as error:
            self._refuse(request, error.message)

    def _open(self, request: Open, lexicon: Lexicon) -> None:
        key = (request.vocabulary, request.vocab_size, request.grammar)
        if key not in self._compiled:
            self._compiled[key] = compile_grammar(lexicon, request.grammar)
            if len(self._compiled) > KEPT_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        session = _Session(request.session, lexicon, self._compiled[key].deep_copy())
        self._sessions[request.session] = session
        self._say(session.take(request.output_ids))

    def _lexicon(self, request: Open) -> Lexicon:
        key = (request.vocabulary, request.vocab_size)
        if key not in self._lexicons:
            self._lexicons[key] = Lexicon(*key)
            if len(self._lexicons) > KEPT_VOCABULARIES:
                self._lexicons.popitem(last=False)
        self._lexicons.move_to_end(key)
        return self._lexicons[key]

    def _refuse(self, request: Open, message: str) -> None:
        self._say(
            Verdict(
                session=request.session,
                position=len(request.output_ids),
                code=BadRequest.code,
                message=message,
            )
        )

    def _say(self, verdict: Verdict) -> None:
        self._connection.sendall(frame(verdict))


def main(arguments: Sequence[str]) -> int:
    """Serve one engine; the exit status."""
    connection = socket.socket(fileno=int(arguments[0]))
    os.set_inheritable(connection.fileno(), False)
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (HELPER_BYTES, HELPER_BYTES))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        Helper(connection).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
