"""The engine's end of the grammar helper.

Nothing here waits, but for a moment and where it is told to.
"""

import itertools
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence

import msgspec

from pilotlight.engine.errors import BadRequest, EngineFailed, Overloaded, UnknownInstance
from pilotlight.engine.grammar.frames import Advance, Close, Frames, Open, ToHelper, Verdict, frame
from pilotlight.policy.request import Grammar, Vocabulary

MAX_GRAMMAR_CHARS = 256 * 1024
MAX_OPENING = 64
"""Grammars that wait to be compiled at once; more are refused."""
OPEN_S = 20.0
"""How long opening may take: a vocabulary, the grammars before it, its own."""
ADVANCE_S = 2.0
"""How long one token may take. A request that takes longer ends, and the helper is replaced."""
MAX_DEATHS = 2
"""Helpers that may die while a request waits for its verdict, before the request is taken for the
reason."""
RECEIVE_BYTES = 1024 * 1024


class Session:
    """One request's grammar: what may come after its output so far.

    A function of grammar and output, wherever it is computed.
    """

    def __init__(self, helper: "GrammarHelper", number: int, request: Open) -> None:
        self.number = number
        self.request = request
        self.output_ids = list(request.output_ids)
        self.verdict: Verdict | None = None
        """Of the output so far; None while it is being computed."""
        self.opened = False
        self.opening = False
        """Its helper has not opened it yet: tokens go out when it has."""
        self.asked_s = 0.0
        self.deaths = 0
        self.helper = helper
        self._missed = False

    @property
    def late(self) -> bool:
        """A step had to do without its verdict, which is still not there."""
        return self._missed and self.verdict is None

    def missed(self) -> None:
        """A step had to do without its verdict."""
        self._missed = True

    def accept(self, token_id: int) -> None:
        """The output has one token more."""
        self.output_ids.append(token_id)
        self._missed = False
        self.helper.advance(self, token_id)

    def end(self) -> None:
        """The request has ended: nothing more is asked."""
        self.helper.close_session(self)


class GrammarHelper:
    """Owns the helper process, which it starts when it is first needed, and again when it has
    died.
    """

    def __init__(self, monotonic_s: Callable[[], float]) -> None:
        self._monotonic_s = monotonic_s
        self._sessions: dict[int, Session] = {}
        self._numbers = itertools.count(1)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._frames = Frames(Verdict)
        self._unsent = bytearray()

    def fileno(self) -> int | None:
        """Readable when a verdict has come; None while nothing is asked."""
        return None if self._connection is None or not self._sessions else self._connection.fileno()

    def open(
        self,
        vocabulary: Vocabulary | None,
        vocab_size: int,
        grammar: Grammar,
        output_ids: Sequence[int],
    ) -> Session:
        """Begins a request's session; its verdict comes later, while the prompt runs, and may be
        that the grammar is wrong.

        Args:
            vocabulary: the model's; None: it is not here.
            vocab_size: tokens for which there are logits: a verdict has a bit for each.
            grammar: what the output has to follow.
            output_ids: what was sampled already, in order.

        Raises:
            UnknownInstance: the vocabulary is not here.
            BadRequest: the grammar is too long.
            Overloaded: too many are being compiled.
        """
        if vocabulary is None:
            raise UnknownInstance("a grammar needs the model's vocabulary, which is not here")
        if len(grammar.text) > MAX_GRAMMAR_CHARS:
            raise BadRequest(
                f"the grammar has {len(grammar.text)} characters; at most {MAX_GRAMMAR_CHARS} are taken"
            )
        if sum(not session.opened for session in self._sessions.values()) >= MAX_OPENING:
            raise Overloaded(f"{MAX_OPENING} grammars are being compiled, of {MAX_OPENING} at most")
        number = next(self._numbers)
        request = Open(
            session=number,
            vocabulary=vocabulary,
            vocab_size=vocab_size,
            grammar=grammar,
            output_ids=list(output_ids),
        )
        session = self._sessions[number] = Session(self, number, request)
        self._open(session)
        return session

    def advance(self, session: Session, token_id: int) -> None:
        """A session's output has one token more; its verdict follows."""
        session.verdict = None
        session.asked_s = self._monotonic_s()
        if not session.opening:
            self._send(Advance(session=session.number, token_id=token_id))

    def close_session(self, session: Session) -> None:
        """Forgets a session."""
        if self._sessions.pop(session.number, None) is not None:
            self._send(Close(session=session.number))

    def wait(self, sessions: Iterable[Session], timeout_s: float) -> None:
        """Takes the verdicts that have come; waits a moment for those of these sessions."""
        until_s = self._monotonic_s() + timeout_s
        self.pump()
        for session in sessions:
            while (
                session.verdict is None
                and self._connection is not None
                and (left_s := until_s - self._monotonic_s()) > 0
            ):
                # Not select: it fails where a process has a thousand descriptors open.
                poll = select.poll()
                poll.register(self._connection, select.POLLIN)
                poll.poll(left_s * 1000)
                self.pump()

    def pump(self) -> None:
        """Sends and takes what can be at once; replaces a helper that is dead or does not get
        on.
        """
        if self._connection is None:
            return
        try:
            self._flush()
            while data := self._connection.recv(RECEIVE_BYTES):
                for verdict in self._frames.feed(data):
                    assert isinstance(verdict, Verdict)
                    self._take(verdict)
            self._replace(self._waiting())
        except BlockingIOError:
            self._replace_stuck()
        except OSError:
            self._replace(self._waiting())

    def stop(self) -> None:
        """Ends the helper."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _take(self, verdict: Verdict) -> None:
        session = self._sessions.get(verdict.session)
        if session is None:
            return
        if session.opening:
            session.opening, session.opened = False, True
            for token_id in session.output_ids[verdict.position :]:
                self._send(Advance(session=session.number, token_id=token_id))
        if verdict.code or verdict.position == len(session.output_ids):
            session.verdict = verdict
            session.deaths = 0

    def _waiting(self) -> list[Session]:
        return [session for session in self._sessions.values() if session.verdict is None]

    def _replace_stuck(self) -> None:
        """Kills a helper that has worked on one thing for too long.

        It works on what was asked first.
        """
        now_s = self._monotonic_s()
        waiting = sorted(self._waiting(), key=lambda session: session.asked_s)
        stuck = [
            session
            for session in waiting
            if now_s - session.asked_s > (ADVANCE_S if session.opened else OPEN_S)
        ]
        if stuck:
            stuck[0].deaths = MAX_DEATHS
            self._replace(stuck[:1])

    def _replace(self, suspects: list[Session]) -> None:
        """Begins all sessions anew in another process, as far as their grammar is not the
        reason.
        """
        self.stop()
        for session in suspects:
            session.deaths += 1
            if session.deaths >= MAX_DEATHS:
                session.verdict = Verdict(
                    session=session.number,
                    position=len(session.output_ids),
                    code=BadRequest.code if session.opened else EngineFailed.code,
                    message="the grammar is too complex: it takes too much time or memory",
                )
        self._frames, self._unsent = Frames(Verdict), bytearray()
        for session in self._sessions.values():
            if session.verdict is None or not session.verdict.code:
                self._open(session)

    def _open(self, session: Session) -> None:
        """Asks for a session, from its output so far on. A verdict that it has still holds."""
        request = msgspec.structs.replace(session.request, output_ids=session.output_ids)
        session.opening = True
        session.asked_s = self._monotonic_s()
        try:
            if self._connection is None:
                self._start()
            self._send(request)
        except OSError as error:
            message = f"the grammar helper cannot be started: {error}"
            session.verdict = Verdict(
                session=session.number,
                position=len(session.output_ids),
                code=EngineFailed.code,
                message=message,
            )

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "pilotlight.engine.grammar.helper", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL
            )
        ours.setblocking(False)
        self._connection = ours

    def _send(self, message: ToHelper) -> None:
        if self._connection is None:
            return
        self._unsent += frame(message)
        try:
            self._flush()
        except OSError:
            # It has died: the wait for a verdict finds out, and what is sent here is said again.
            return

    def _flush(self) -> None:
        assert self._connection is not None
        while self._unsent:
            try:
                sent = self._connection.send(self._unsent)
            except BlockingIOError:
                return
            del self._unsent[:sent]
