"""The requests that a worker has accepted, with every token that their gateways have not
acknowledged.

Bookkeeping alone: no bus, no engine, no clock. Core NATS may drop a token batch, so a token is kept
until it is acknowledged and can be sent again. Positions of one request::

    0          first        kept         next
    [earlier ..)[acknowledged)[kept ......)
     attempts                  may be sent again
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from itertools import chain

import msgspec

from pilotlight.common.errors import BadRequest, Conflict, InternalError, NotFound, QueueFull
from pilotlight.common.messages.engine import Produced
from pilotlight.common.messages.prompts import PromptLogprobs
from pilotlight.common.messages.tokens import AckEntry, Resend, Submit, TokenEntry
from pilotlight.policy.device_time import DeviceShares
from pilotlight.policy.ids import GatewayId, InstanceId, RequestId
from pilotlight.policy.request import FinishReason, RequestKey

FINISHED_KEPT_S = 60.0
"""A finished request whose end is not acknowledged is forgotten after this time."""
SILENCE_S = 10.0
"""A gateway that acknowledges nothing for this long, though it was sent tokens, is taken for dead:
it should once a second."""
KEPT_PER_RUNNING = 4
"""Requests kept in memory for each that may run: finished ones wait here for their last
acknowledgement."""
FORGOTTEN_KEPT = 4096
"""Forgotten keys that are remembered, so that a late submit, or a late repetition, does not run."""
RETRY_AFTER_S = 1.0


class Unsent(msgspec.Struct, frozen=True, gc=False):
    """Tokens of a request, from a position on, and the gateway that waits for them. The tokens
    themselves stay in the table: what comes until they are sent goes with them.
    """

    gateway_id: GatewayId
    key: RequestKey
    position: int
    waits: bool = False
    """They may leave with later ones: nobody looks at them yet (``Submit.whole``)."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Kept:
    key: RequestKey
    gateway_id: GatewayId
    instance_id: InstanceId
    kept: int
    """Position of the first token in ``token_ids``."""
    held_tokens: int
    """Prompt and output that it came with."""
    whole: bool = False
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float | None] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    finish: FinishReason | None = None
    code: str = ""
    message: str = ""
    cached_tokens: int = 0
    prompt: PromptLogprobs | None = None
    """Until its first token is acknowledged."""
    vector: bytes | None = None
    """Likewise."""
    waits_since_s: float | None = None
    """Since when its gateway has been silent with something outstanding; None when nothing is."""
    cancelled: bool = False
    device_s: float = 0.0
    """What it had of the device, up to its last token."""

    @property
    def next(self) -> int:
        """Position of the next token."""
        return self.kept + len(self.token_ids)

    def entry_from(self, position: int) -> TokenEntry:
        """Everything that is kept from a position on."""
        skip = max(0, position - self.kept)
        return TokenEntry(
            request_id=self.key.request_id,
            attempt=self.key.attempt,
            seq=self.kept + skip,
            token_ids=self.token_ids[skip:],
            logprobs=None if self.logprobs is None else self.logprobs[skip:],
            finish=self.finish,
            code=self.code,
            message=self.message,
            top_logprobs=None if self.top_logprobs is None else self.top_logprobs[skip:],
            cached_tokens=0 if self.kept + skip else self.cached_tokens,
            prompt=None if self.kept + skip else self.prompt,
            vector=None if self.kept + skip else self.vector,
            device_s=self.device_s,
        )


class RequestTable:
    """Accepted requests by key. Bounded; nothing stays for ever."""

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._kept: dict[tuple[RequestId, int], _Kept] = {}
        """By their keys."""
        self._attempts: dict[RequestId, list[_Kept]] = {}
        """Of each request that is kept, the attempts that are."""
        self._in_flight: dict[InstanceId, int] = {}
        self._held_tokens: Counter[InstanceId] = Counter()
        self._ended_s: dict[InstanceId, float] = {}
        self._forgotten: OrderedDict[RequestKey, None] = OrderedDict()
        self.shares = DeviceShares()
        """Of the device's time: these requests, and stages that load (``HeldTable``)."""

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def max_running(self) -> int:
        """Requests that may be in flight at once."""
        return self._max_running

    @property
    def running(self) -> int:
        """Requests that the engine has not ended."""
        return sum(self._in_flight.values())

    def in_flight(self, instance_id: InstanceId) -> int:
        """Requests of one instance that the engine has not ended."""
        return self._in_flight.get(instance_id, 0)

    def held_tokens(self, instance_id: InstanceId) -> int:
        """Tokens with which the requests in flight on one instance came."""
        return self._held_tokens[instance_id]

    def ended_s(self, instance_id: InstanceId) -> float | None:
        """When the instance's last request ended; None when it had none."""
        return self._ended_s.get(instance_id)

    def instance_of(self, key: RequestKey) -> InstanceId | None:
        """Where a request runs, or ran; None when it is not known."""
        kept = self._kept.get(key)
        return kept.instance_id if kept is not None else None

    def knows(self, key: RequestKey) -> bool:
        """Whether a submit was accepted before, so that its answer is given from memory."""
        return key in self._kept or key in self._forgotten

    def has_attempts(self, request_id: RequestId) -> bool:
        """Whether any attempt of a request is kept."""
        return request_id in self._attempts

    def wants(self, key: RequestKey) -> bool:
        """Whether a request is here that has not ended, and a client waits for it."""
        kept = self._kept.get(key)
        return kept is not None and kept.finish is None and not kept.cancelled

    def accept(self, submit: Submit) -> tuple[RequestKey, ...]:
        """Take a new request; earlier attempts of it, which the engine should drop now, are
        returned.

        Raises:
            QueueFull: as many run, or wait for their last acknowledgement, as may.
            Conflict: a later attempt is here already.
        """
        key = RequestKey(submit.request_id, submit.attempt)
        others = tuple([other.key for other in self._attempts.get(key.request_id, ())])
        if any(other.attempt > key.attempt for other in others):
            raise Conflict(f"a later attempt of {key.request_id} is here already")
        if (
            self.running >= self._max_running
            or len(self._kept) >= self._max_running * KEPT_PER_RUNNING
        ):
            raise QueueFull(
                f"{self.running} requests run here, of {self._max_running} at most",
                retry_after_s=RETRY_AFTER_S,
            )
        kept = self._kept[key] = _Kept(
            key=key,
            gateway_id=submit.gateway_id,
            instance_id=submit.instance_id,
            kept=len(submit.output_ids),
            held_tokens=len(submit.prompt_ids) + len(submit.output_ids),
            whole=submit.whole,
            logprobs=[] if submit.sampling.logprobs else None,
            top_logprobs=[] if submit.sampling.logprobs and submit.sampling.top_logprobs else None,
        )
        self._attempts.setdefault(key.request_id, []).append(kept)
        self._in_flight[submit.instance_id] = self.in_flight(submit.instance_id) + 1
        self._held_tokens[submit.instance_id] += kept.held_tokens
        return self._drop(others)

    def produced(self, produced: Produced, now_s: float, *more: Produced) -> Unsent | None:
        """Keep what a step gave a request; None when no client waits for it. ``more`` goes on
        where it ended, without log probabilities.

        Raises:
            InternalError: the engine skipped or repeated a position.
        """
        kept = self._kept.get((produced.request_id, produced.attempt))
        if kept is None or kept.finish is not None:
            return None
        last = more[-1] if more else produced
        if kept.cancelled:
            if last.finish is not None:
                self._end(kept, now_s)
                self._forget(kept)
            return None
        start = kept.kept + len(kept.token_ids)
        if (position := produced.position) != start:
            named = kept.key.request_id
            raise InternalError(f"the engine gave {named} position {position}, not {start}")
        token_ids = (*produced.token_ids, *chain.from_iterable([one.token_ids for one in more]))
        kept.token_ids += token_ids
        kept.device_s = self.shares.so_far_s(kept.key, now_s)
        kept.cached_tokens = kept.cached_tokens or produced.cached_tokens
        kept.prompt = kept.prompt or produced.prompt
        kept.vector = kept.vector or produced.vector
        if kept.logprobs is not None:
            kept.logprobs.extend(produced.logprobs or [None] * len(token_ids))
        if kept.top_logprobs is not None:
            kept.top_logprobs.extend(map(list, produced.top_logprobs or ([] for _ in token_ids)))
        if last.finish is not None:
            kept.finish, kept.code, kept.message = last.finish, last.code, last.message
            self._end(kept, now_s)
        waits = kept.waits_since_s is not None and last.finish is None
        if not waits:
            kept.waits_since_s = now_s
        return Unsent(kept.gateway_id, kept.key, start, kept.whole and waits)

    def entry(self, key: RequestKey, position: int) -> TokenEntry | None:
        """What is kept of a request from a position on; None when no client waits for it any more,
        or all of it has arrived.
        """
        kept = self._kept.get(key)
        if kept is None or kept.cancelled:
            return None
        entry = kept.entry_from(position)
        return entry if entry.token_ids or entry.finish is not None else None

    def acknowledge(
        self, gateway_id: GatewayId, entry: AckEntry, now_s: float
    ) -> RequestKey | None:
        """Forget what has arrived.

        Returns the request when its gateway is done with it before the engine is: it is to be
        aborted.
        """
        key = RequestKey(entry.request_id, entry.attempt)
        kept = self._kept.get(key)
        if kept is None and entry.done:
            # Its client left while the submit was on its way, and that came in second: it must not
            # run without one.
            self._remember_forgotten(key)
        if kept is None or kept.gateway_id != gateway_id:
            return None
        arrived = min(entry.seq, kept.next) - kept.kept
        if arrived > 0:
            del kept.token_ids[:arrived]
            if kept.logprobs is not None:
                del kept.logprobs[:arrived]
            if kept.top_logprobs is not None:
                del kept.top_logprobs[:arrived]
            kept.kept += arrived
            kept.prompt = kept.vector = None
        outstanding = bool(kept.token_ids) or kept.finish is not None
        kept.waits_since_s = now_s if outstanding else None
        return next(iter(self._drop((kept.key,))), None) if entry.done else None

    def resend(self, request: Resend) -> TokenEntry | None:
        """Everything from a position on; None when there is nothing new.

        Raises:
            NotFound: the request is not known (any more): it has to go on elsewhere.
            BadRequest: tokens from that position were acknowledged, or not made yet.
        """
        kept = self._kept.get(RequestKey(request.request_id, request.attempt))
        if kept is None or kept.cancelled:
            raise NotFound(
                f"request {request.request_id}, attempt {request.attempt}, is not known here"
            )
        if not kept.kept <= request.from_seq <= kept.next:
            raise BadRequest(
                f"asked from {request.from_seq}, but only [{kept.kept}, {kept.next}) is kept"
            )
        entry = kept.entry_from(request.from_seq)
        return entry if entry.token_ids or entry.finish is not None else None

    def cancel(self, gateway_id: GatewayId, request_ids: list[RequestId]) -> tuple[RequestKey, ...]:
        """No client waits for these: returns the ones that the engine is to abort.

        Only their own gateway may say so.
        """
        return self._drop(
            tuple(
                kept.key
                for request_id in dict.fromkeys(request_ids)
                for kept in self._attempts.get(request_id, ())
                if kept.gateway_id == gateway_id
            )
        )

    def expire(self, now_s: float) -> tuple[RequestKey, ...]:
        """Forget the finished whose gateway never said so; give up those of silent gateways, which
        the engine is to abort.
        """
        silent: list[RequestKey] = []
        for kept in list(self._kept.values()):
            silent_s = 0.0 if kept.waits_since_s is None else now_s - kept.waits_since_s
            if kept.finish is not None and silent_s >= FINISHED_KEPT_S:
                self._forget(kept)
            elif kept.finish is None and not kept.cancelled and silent_s >= SILENCE_S:
                silent.append(kept.key)
        return self._drop(tuple(silent))

    def bus_was_down(self, now_s: float) -> None:
        """No gateway could be heard: start counting silence anew."""
        for kept in self._kept.values():
            if kept.waits_since_s is not None:
                kept.waits_since_s = now_s

    def fail(
        self, code: str, message: str, now_s: float, instance_id: InstanceId | None = None
    ) -> tuple[Unsent, ...]:
        """End running requests, because the engine cannot go on with them.

        Args:
            code: Of the error that they end with.
            message: The error's.
            now_s: The moment, monotonic.
            instance_id: Whose requests; None: all.
        """
        failed: list[Unsent] = []
        for kept in list(self._kept.values()):
            if kept.finish is not None or (
                instance_id is not None and kept.instance_id != instance_id
            ):
                continue
            produced = Produced(
                request_id=kept.key.request_id,
                attempt=kept.key.attempt,
                position=kept.next,
                finish=FinishReason.ERROR,
                code=code,
                message=message,
            )
            unsent = self.produced(produced, now_s)
            if unsent is not None:
                failed.append(unsent)
        return tuple(failed)

    def instance_gone(self, instance_id: InstanceId) -> None:
        """Its stage is held no more: forget when it was last used."""
        self._ended_s.pop(instance_id, None)

    def _drop(self, keys: tuple[RequestKey, ...]) -> tuple[RequestKey, ...]:
        """Of these, forget the finished; mark and return the ones that still run."""
        running: list[RequestKey] = []
        for key in keys:
            kept = self._kept[key]
            if kept.finish is not None:
                self._forget(kept)
            elif not kept.cancelled:
                # It stays until the engine confirms: until then it takes the engine's memory, and
                # counts as in flight.
                kept.cancelled = True
                kept.token_ids.clear()
                running.append(key)
        return tuple(running)

    def _end(self, kept: _Kept, now_s: float) -> None:
        self._ended_s[kept.instance_id] = now_s
        self.shares.end(kept.key, now_s)
        self._left(kept)

    def _left(self, kept: _Kept) -> None:
        self._held_tokens[kept.instance_id] -= kept.held_tokens
        left = self.in_flight(kept.instance_id) - 1
        if left > 0:
            self._in_flight[kept.instance_id] = left
        else:
            self._in_flight.pop(kept.instance_id, None)
            self._held_tokens.pop(kept.instance_id, None)

    def _forget(self, kept: _Kept) -> None:
        del self._kept[kept.key]
        attempts = self._attempts[kept.key.request_id]
        attempts.remove(kept)
        if not attempts:
            del self._attempts[kept.key.request_id]
        self._remember_forgotten(kept.key)

    def _remember_forgotten(self, key: RequestKey) -> None:
        self._forgotten[key] = None
        while len(self._forgotten) > FORGOTTEN_KEPT:
            self._forgotten.popitem(last=False)
