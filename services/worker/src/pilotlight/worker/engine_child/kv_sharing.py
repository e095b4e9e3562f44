"""KV of requests that move here from another engine, and of those that move from here to others.

::

    Run(kv_at) ──> asked for, by a thread ──> it runs with what came
                        │ nothing there, too late, nobody there
                        └────────────────────> it runs, and all of it is computed

Threads wait for the other engines. What is in place here is looked at by the engine's own thread
alone, one look between two steps.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Protocol

import structlog

from pilotlight.common.handshake import Identity
from pilotlight.common.messages.engine import Run
from pilotlight.engine.core.blocks import BLOCK_TOKENS
from pilotlight.engine.errors import EngineError, PeerSilent
from pilotlight.engine.faults import context_lost
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.model import Stage
from pilotlight.policy.request import RequestKey

if TYPE_CHECKING:
    from torch import Tensor

    from pilotlight.engine.channel.device_path import Devices
    from pilotlight.engine.channel.tcp import TcpChannel
    from pilotlight.engine.kv_pieces import KvPiece
    from pilotlight.engine.kv_sharing import KvAsked

log = structlog.get_logger()

ABOUT = "kv/"
"""What channels are about by which KV is asked for; each has a name of its own behind it."""
ASK_S = 2.0
"""From when a request comes until what has not come of its KV is computed."""
ANSWER_S = 5.0
"""For each frame of an answer, and for the look at what is there."""
MAX_ASKED = 64
"""Requests whose KV is asked for at once; others are computed."""
ASKED_DEVICE_BYTES = 256 << 20
"""Of what has come and not been taken up yet, on the device; the rest waits in the host's
memory."""
RING_BYTES = 128 << 20
"""Of device memory by which an answer goes to an engine of the same host."""
OFFERED_S = 0.1
"""How long an answer waits for the other engine to map that."""
MAX_ANSWERED = 8
"""Engines that ask at once; others are sent away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A request that is to run now."""

    run: Run
    sent_s: float
    pieces: "tuple[KvPiece, ...]"
    """What came of its KV."""

    @property
    def device_bytes(self) -> int:
        """What of that lies on the device."""
        tensors = (piece.keys_and_values for piece in self.pieces)
        return sum(tensor.nbytes for tensor in tensors if tensor.device.type != "cpu")


@dataclass(frozen=True, slots=True)
class _Look:
    """What a thread wants to know of the engine."""

    asked: "KvAsked"
    layer: int
    on_device: bool
    found: "SimpleQueue[tuple[Stage, Tensor] | None]"


class SharingEngine(Protocol):
    """What is asked of the engine for it."""

    def shared_kv(
        self, instance_id: InstanceId, token_ids: Sequence[int], layer: int, *, on_device: bool
    ) -> "tuple[Stage, Tensor] | None": ...


class KvSharing:
    """Asks, and answers. Used by the engine's thread, but for ``visit``."""

    def __init__(
        self,
        monotonic_s: Callable[[], float],
        me: Callable[[], Identity | None],
        wake: Callable[[], None],
        devices: "Callable[[], Devices | None]" = lambda: None,
    ) -> None:
        """Nothing is asked or answered yet.

        Args:
            monotonic_s: the clock of deadlines.
            me: what this node proves; None: it knows no cluster's key.
            wake: has the engine's thread call ``moved`` and ``look`` soon.
            devices: this engine's device; None: the host's memory is all there is.
        """
        self._monotonic_s = monotonic_s
        self._me = me
        self._wake = wake
        self._devices = devices
        self._asked: dict[RequestKey, Run] = {}
        """What is not to run before its KV has come."""
        self._wanted: SimpleQueue[tuple[Run, float]] = SimpleQueue()
        self._moved: SimpleQueue[Moved] = SimpleQueue()
        self._moved_bytes = SimpleQueue[int]()
        """Of them on the device, as they leave ``_moved``: the thread that asks counts."""
        self._asking = False
        self._looks: SimpleQueue[_Look] = SimpleQueue()
        self._answering = threading.BoundedSemaphore(MAX_ANSWERED)

    # Asking.

    def asks(self, run: Run, sent_s: float) -> bool:
        """Begin to ask for a request's KV: ``moved`` gives the request back. False: it is to run
        at once.

        Args:
            run: the request.
            sent_s: when its worker sent it.
        """
        too_short = len(run.prompt_ids) + len(run.output_ids) <= BLOCK_TOKENS
        if (
            run.kv_at is None
            or too_short
            or self._me() is None
            or len(self._asked) >= MAX_ASKED
            or _key_of(run) in self._asked
        ):
            return False
        if not self._asking:
            self._asking = True
            threading.Thread(target=self._ask_all, name="kv of others", daemon=True).start()
        self._asked[_key_of(run)] = run
        self._wanted.put((run, sent_s))
        return True

    def moved(self) -> tuple[Moved, ...]:
        """Requests that can run now, and have not been called off meanwhile."""
        found: list[Moved] = []
        with suppress(Empty):
            while True:
                one = self._moved.get_nowait()
                self._moved_bytes.put(one.device_bytes)
                if self._asked.get(_key_of(one.run)) is one.run:
                    del self._asked[_key_of(one.run)]
                    found.append(one)
        return tuple(found)

    def call_off(self, key: RequestKey) -> Run | None:
        """A request that waits for its KV is not to run any more; None: it does not wait."""
        return self._asked.pop(key, None)

    def _ask_all(self) -> None:
        left_bytes = ASKED_DEVICE_BYTES
        while True:
            run, sent_s = self._wanted.get()
            with suppress(Empty):
                while True:
                    left_bytes += self._moved_bytes.get_nowait()
            if self._asked.get(_key_of(run)) is not run:
                continue  # It was called off.
            pieces: tuple[KvPiece, ...] = ()
            began_s = self._monotonic_s()
            try:
                pieces = self._ask(run, sent_s + ASK_S, left_bytes)
                if not pieces:
                    log.info("no KV is there", action="kv_missed", request_id=run.request_id)
            except (EngineError, OSError) as error:
                log.info(
                    "no KV comes", action="kv_missed", request_id=run.request_id, why=str(error)
                )
            except Exception as error:
                log.error("no KV comes", action="kv_missed", exc_info=error)
            if pieces:
                log.info(
                    "KV came with a request",
                    action="kv_came",
                    request_id=run.request_id,
                    tokens=min(piece.stop for piece in pieces),
                    took_s=self._monotonic_s() - began_s,
                    on_device=all(piece.keys_and_values.device.type != "cpu" for piece in pieces),
                )
            moved = Moved(run=run, sent_s=sent_s, pieces=pieces)
            left_bytes -= moved.device_bytes
            self._moved.put(moved)
            self._wake()

    def _ask(self, run: Run, until_s: float, device_bytes: int) -> "tuple[KvPiece, ...]":
        # Only here: torch is imported when the engine is, and not before.
        from pilotlight.engine.channel.tcp import connect
        from pilotlight.engine.kv_sharing import KvAsked, ask

        def left_s() -> float:
            return max(0.0, until_s - self._monotonic_s())

        me, at = self._me(), run.kv_at
        assert me is not None
        assert at is not None
        if not left_s():
            raise PeerSilent("those before it took all of its time")
        channel = connect(
            (at.host, at.port),
            me,
            at.node_id,
            f"{ABOUT}{run.request_id}/{run.attempt}",
            self._monotonic_s,
            left_s(),
            devices=self._devices(),
        )
        try:
            asked = KvAsked(
                instance_id=at.instance_id, token_ids=(*run.prompt_ids, *run.output_ids)
            )
            return ask(channel, asked, _key_of(run), left_s, device_bytes)
        finally:
            channel.close()

    # Answering.

    def visit(self, channel: "TcpChannel") -> None:
        """Another engine has come to ask. From any thread."""
        if not self._answering.acquire(blocking=False):
            channel.close()
            return
        threading.Thread(
            target=self._answer, args=(channel,), name="kv for others", daemon=True
        ).start()

    def look(self, engine: SharingEngine) -> None:
        """Find what one of those that ask wants to know, if one does.

        Raises what the engine raises after which its process is not to be trusted.
        """
        try:
            look = self._looks.get_nowait()
        except Empty:
            return
        if not self._looks.empty():
            self._wake()
        found = None
        try:
            found = engine.shared_kv(
                look.asked.instance_id,
                look.asked.token_ids,
                look.layer,
                on_device=look.on_device,
            )
        except Exception as error:
            if context_lost(error):
                raise
            log.error("KV cannot be read", action="kv_not_given", exc_info=error)
        finally:
            look.found.put(found)

    def _answer(self, channel: "TcpChannel") -> None:
        from pilotlight.engine.kv_sharing import answer

        def find(asked: "KvAsked", layer: int) -> "tuple[Stage, Tensor] | None":
            return self._find(asked, layer, on_device=channel.carries_device(OFFERED_S))

        try:
            channel.offer_device(RING_BYTES)
            answer(channel, find, ANSWER_S)
        except (EngineError, OSError) as error:
            log.debug("who asked for KV is gone", action="kv_not_given", why=str(error))
        except Exception as error:
            log.error("no KV is given", action="kv_not_given", exc_info=error)
        finally:
            channel.close()
            self._answering.release()

    def _find(
        self, asked: "KvAsked", layer: int, *, on_device: bool
    ) -> "tuple[Stage, Tensor] | None":
        look = _Look(asked, layer, on_device, SimpleQueue())
        self._looks.put(look)
        self._wake()
        try:
            return look.found.get(timeout=ANSWER_S)
        except Empty:
            raise PeerSilent(f"the engine did not look within {ANSWER_S} s") from None


def _key_of(run: Run) -> RequestKey:
    return RequestKey(run.request_id, run.attempt)
