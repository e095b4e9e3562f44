"""A request's life, from arrival to its last token, whatever becomes of the workers that run it.

::

    arrive ──> held ──> submitted ──> streaming ──> ended
                ^           |             |
                |  refused  |   worker    |
                └───────────┴── lost ─────┘     (with prompt and output so far: the same tokens follow)

``Requests.run`` runs in the task of the HTTP request itself: when the client leaves, that task is
cancelled, and whatever the request has (its place, its attempt) is let go on the way out.
"""

from functools import partial

import structlog

from pilotlight.common.errors import (
    CallerError,
    DeadlineExceeded,
    InternalError,
    NoRoom,
    NotLoaded,
    PilotlightError,
    QueueFull,
    WorkerLost,
    error_of,
)
from pilotlight.common.messages.tokens import Submit
from pilotlight.common.telemetry import span
from pilotlight.gateway.serving.first_token import FirstTokens, Submitted
from pilotlight.gateway.serving.queue import PROGRESS_INTERVAL_S, Place
from pilotlight.gateway.serving.relay import Attempt
from pilotlight.gateway.serving.request_parts import RequestParts
from pilotlight.gateway.serving.request_time import RequestTime
from pilotlight.gateway.serving.route import Route
from pilotlight.gateway.serving.submitting import sampling_on, submitted
from pilotlight.gateway.serving.token_log import PromptRead
from pilotlight.gateway.serving.token_request import (
    Held,
    Listener,
    ListenerFailed,
    TokenRequest,
    Tokens,
    Update,
)
from pilotlight.gateway.serving.turned_away import check_room
from pilotlight.policy.ids import InstanceId, ModelName
from pilotlight.policy.pace import LEAST_WAIT_S
from pilotlight.policy.plan import Instance
from pilotlight.policy.request import FinishReason

log = structlog.get_logger()

MAX_LOSSES = 3
"""Attempts lost before the first token, and again after it, with which the request fails."""
SOON_S = 1.5 * LEAST_WAIT_S
"""A turn at an instance that serves comes sooner than that: its line is ``LEAST_WAIT_S`` long at
most. To tell each of a full line that it waits would take time that others need for tokens, and the
line would stay full at a rate that the gateway can do without one."""
AVOID_REFUSED_S = 0.1
AVOID_LOST_S = 1.0


class Requests:
    """Runs requests."""

    def __init__(self, parts: RequestParts) -> None:
        self._parts = parts
        self._first_tokens = FirstTokens(parts.phases, parts.clock)
        self.check_room = partial(check_room, parts)
        """See ``turned_away``."""
        self.preparing = parts.queue.room.preparing
        """Around the preparing of a request's prompt."""
        self.live = 0
        """Requests that are held or run."""

    def arrived(self, model: ModelName) -> None:
        """Count one that is turned away: instances start for what comes, not for what is let in."""
        self._parts.arrivals.arrived(model)

    async def run(self, request: TokenRequest, listener: Listener) -> None:
        """Tell what happens to a request, until it has ended.

        Raises:
            TooManyHeld: no instance is ready and no place is left.
            TransientError: a deadline passed, or its workers were lost too often.
            CallerError: the engine cannot run it at all.
        """
        self._parts.arrivals.arrived(request.model.name)
        self.live += 1
        life = _Life(self._parts, request, self._first_tokens, listener)
        try:
            while life.finish is None:
                # No coroutine around the wait: as many requests as wait would each keep it.
                with life.entered() as life.place:
                    while not await life.place.decided(life.patience_s()):
                        await life.tell_held()
                    life.place.take()
                if await life.attempt():
                    return
            await life.tell(Tokens([], life.read, life.device_s, life.finish))
        except ListenerFailed as failed:
            raise failed.error from failed
        finally:
            self.live -= 1


class _Life:
    """One request's."""

    def __init__(
        self,
        parts: RequestParts,
        request: TokenRequest,
        first_tokens: FirstTokens,
        listener: Listener,
    ) -> None:
        self._parts = parts
        self._request = request
        self._first_tokens = first_tokens
        self._listener = listener
        self._clock = parts.clock
        self._output_ids: list[int] = []
        self._attempts = self._losses = 0
        self._ran_at: InstanceId | None = None
        self.place: Place | None = None
        self._told_held = self._waited_out = False
        self._accepted_s = 0.0
        self.finish: FinishReason | None = None
        """Why the engine ended it; None: it has not."""
        self.read: PromptRead | None = None
        self._sampling = request.sampling
        slo_s = request.model.slo.ttft_ms / 1000
        hold_s = max(slo_s * parts.hold_slo_factor, parts.hold_timeout_s)
        self._time = RequestTime(parts.clock, request, hold_s)
        self.device_s = 0.0
        """Device-seconds of the attempts that are over."""
        self._tokens_before = 0
        """Output that earlier attempts had given."""

    async def tell(self, update: Update) -> bool:
        """Whether the listener wants no more; its error leaves as ``ListenerFailed``."""
        try:
            return await self._listener(update)
        except PilotlightError as error:
            raise ListenerFailed(error) from error

    # Held.

    def entered(self) -> Place:
        """A place to wait for an instance; raises what ``Requests.run`` does."""
        ticket = self._time.ticket(len(self._output_ids))
        self._told_held = False
        return self._parts.queue.enter(ticket, returning=self._attempts > 0)

    def patience_s(self) -> float:
        """How long it waits before it is told that it still does; the first time not at all where
        no instance serves.
        """
        if self._told_held:
            interval_s = self._parts.queue.progress_interval_s
        else:
            interval_s = SOON_S if self._parts.fleet.serving(self._request.model.name) else 0.0
        return min(interval_s, self._time.held_left_s())

    async def tell_held(self) -> None:
        """It still waits; raises what ``Requests.run`` does."""
        assert self.place is not None
        if self._told_held and self._time.held_left_s() <= 0:
            raise await self._parts.explainer.why(self._request.model, self._time.since_s)
        self._told_held = True
        await self.tell(self._progress(self.place))

    def _progress(self, place: Place) -> Held:
        model, fleet = self._request.model, self._parts.fleet
        progress = fleet.progress(model.name, model.digest)
        loaded = place.assigned is not None and fleet.serves(place.assigned.instance.instance_id)
        phase = "prefill" if loaded else progress.phase
        elapsed_s = self._clock.monotonic_s() - self._request.arrived_s
        return Held(
            ahead=self._parts.queue.ahead(place),
            phase=phase,
            fetched=progress.fetched,
            elapsed_s=elapsed_s,
        )

    async def _while_loading(self, attempt: Attempt, place: Place, route: Route) -> None:
        """Until something comes of an attempt on an instance that was still loading when it got it.

        Raises:
            NotLoaded: another instance is ready before it.
            PilotlightError: it has waited for as long as it may, or no request may wait any more.
        """
        model, fleet = self._request.model, self._parts.fleet
        instance_id = route.instance.instance_id
        await self.tell(self._progress(place))

        def left_s() -> float:
            return self._time.left_s() if fleet.serves(instance_id) else self._time.held_left_s()

        while not await attempt.news(min(PROGRESS_INTERVAL_S, left_s())):
            if self._time.left_s() <= 0:
                raise self._time.too_late(len(self._output_ids))
            if left_s() <= 0:
                self._waited_out = True
                raise await self._parts.explainer.why(model, self._time.since_s)
            if not fleet.serves(instance_id) and place.error is not None:
                raise place.error
            if not fleet.serves(instance_id) and fleet.serving(model.name):
                raise NotLoaded(f"another instance of {model.name} is ready before {instance_id}")
            await self.tell(self._progress(place))

    # Submitted and streaming.

    async def attempt(self) -> bool:
        """One attempt; whether the listener wants no more."""
        place = self.place
        assert place is not None
        assert place.assigned is not None
        route, instance = place.assigned, place.assigned.decode.instance
        self._attempts += 1
        self._tokens_before = len(self._output_ids)
        relay = self._parts.relay
        attempt = relay.open(
            self._request.request_id,
            self._attempts,
            instance.lead,
            instance.instance_id,
            len(self._output_ids),
        )
        again = enough = False
        try:
            await self._submit(attempt, route)
            if not route.serving:
                await self._while_loading(attempt, place, route)
            with span("stream", worker_id=instance.lead, attempt=self._attempts):
                enough = await self._stream(attempt, place)
            if not enough:
                self._end(attempt)
        except PilotlightError as error:
            if place.error is not None and not self._parts.fleet.serves(route.instance.instance_id):
                raise place.error from error
            self._retry_or_raise(error, route, attempt)
            again = self.finish is None
        finally:
            self.device_s += attempt.log.device_s
            relay.close(attempt, ended=not again)
            if attempt.accepted:
                self._ran_at = instance.instance_id
                self._parts.router.full.freed(route.instance.lead)
            self._parts.queue.attempted(place)
        return enough

    async def _stream(self, attempt: Attempt, place: Place) -> bool:
        """Every token of an attempt; whether its end was told with them, or no more are wanted."""
        # What is there is taken before the end is looked at: all of it may have come before the
        # submit was answered.
        received = attempt.log
        while True:
            tokens = await attempt.next(min(PROGRESS_INTERVAL_S, max(0.0, self._time.left_s())))
            if tokens:
                if not self._output_ids:
                    self._first_token(attempt, place)
                self._output_ids += [token.token_id for token in tokens]
                ended, device_s = received.ended, self.device_s + received.device_s
                enough = await self.tell(Tokens(tokens, received.read, device_s, ended))
                if enough or ended is not None:
                    return True
            elif received.finish is not None:
                return False
            if received.finish is None and self._time.left_s() <= 0:
                raise self._time.too_late(len(self._output_ids))

    async def _submit(self, attempt: Attempt, route: Route) -> None:
        """Hand it to the worker; returns when it is accepted."""
        accepted = False
        try:
            with span("submit", worker_id=route.instance.lead, attempt=attempt.number):
                self._sampling = sampling_on(
                    self._request,
                    self._sampling,
                    len(self._output_ids),
                    self._parts.fleet.kv_capacity_tokens(route.decode.instance),
                )
                reply = await submitted(
                    self._parts.relay,
                    attempt,
                    lambda: self._message(attempt, route.instance),
                    route.instance.lead,
                )
                if not reply.accepted:
                    raise error_of(reply.code, reply.message, reply.retry_after_s or None)
            accepted = True
            self._accepted_s = self._clock.monotonic_s()
        finally:
            self._parts.router.answered(route.instance, accepted=accepted)
            self._parts.queue.pump(self._request.model.name)

    def _message(self, attempt: Attempt, instance: Instance) -> Submit:
        request = self._request
        return Submit(
            request_id=request.request_id,
            attempt=attempt.number,
            gateway_id=self._parts.gateway_id,
            instance_id=instance.instance_id,
            model=request.model.name,
            prompt_ids=request.prompt_ids.tolist(),
            output_ids=list(self._output_ids),
            sampling=self._sampling,
            deadline_in_s=self._time.deadline_in_s,
            share=request.share,
            promise=self._time.promise(bool(self._output_ids)),
            whole=request.whole,
            moved_from=self._ran_at,
        )

    def _end(self, attempt: Attempt) -> None:
        """Take the engine's word for the end of the request.

        Raises:
            PilotlightError: it did not end well.
        """
        if attempt.finish is FinishReason.ERROR:
            raise error_of(attempt.log.code, attempt.log.message)
        if attempt.finish is FinishReason.CANCELLED:
            raise WorkerLost(f"worker {attempt.worker_id} dropped the request")
        self.finish, self.read = attempt.finish, attempt.log.read

    def _retry_or_raise(self, error: PilotlightError, route: Route, attempt: Attempt) -> None:
        """After a refusal or a loss: return when another attempt may help.

        1. The request itself is wrong, or too large for the instance's KV, or its time is over, by
           whichever clock: no.
        2. Refused before it ran, or the load came to nothing that it waited for: the queue's
           deadline is the limit. Where its instance made room for others after it had served it for
           a while, it waits anew, behind those that wait already.
        3. All of its tokens had arrived: it has ended.
        4. Lost while it ran: three times before the first token, three times after. It gets a whole
           new waiting time with each loss: what it waited for an instance that was lost is not its
           own.
        """
        instance_id = route.instance.instance_id
        model = self._request.model.name
        if isinstance(error, CallerError | NoRoom) or self._waited_out:  # 1
            raise error
        ended_late = attempt.finish is FinishReason.ERROR and isinstance(error, DeadlineExceeded)
        if ended_late or self._time.left_s() <= 0:
            raise self._time.too_late(len(self._output_ids)) from error
        if len(self._output_ids) > self._tokens_before:
            self._time.wait_anew()
        if isinstance(error, NotLoaded) or not (
            attempt.accepted or isinstance(error, InternalError)
        ):  # 2
            if isinstance(error, QueueFull):
                self._parts.router.full.refused(route.instance.lead, error.retry_after_s)
            else:
                self._avoid(instance_id, error.retry_after_s or AVOID_REFUSED_S)
            log.info(
                "submit refused",
                action="submit_refused",
                model=model,
                instance_id=instance_id,
                code=error.code,
            )
        elif len(self._output_ids) >= self._sampling.max_tokens:  # 3
            self.finish = FinishReason.LENGTH
        else:  # 4
            self._losses += 1
            if self._losses >= MAX_LOSSES + bool(self._output_ids):
                raise error_of(
                    error.code, f"given up after {self._losses} lost attempts: {error.message}"
                ) from error
            self._avoid(instance_id, AVOID_LOST_S)
            if self._output_ids:
                self._time.wait_anew()
            else:
                self._time.renew()
            log.warning(
                "attempt lost",
                action="attempt_lost",
                model=model,
                instance_id=instance_id,
                code=error.code,
            )

    def _avoid(self, instance_id: InstanceId, for_s: float) -> None:
        self._parts.router.avoid(instance_id, for_s)
        self._parts.queue.pump_later(self._request.model.name, for_s)

    def _first_token(self, attempt: Attempt, place: Place) -> None:
        """Tell the scheduler of the end of a cold start."""
        self._losses = 0
        if not place.waited:
            return
        request = self._request
        submitted = Submitted(
            request_id=request.request_id, arrived_s=request.arrived_s, accepted_s=self._accepted_s
        )
        self._first_tokens.came(submitted, place, attempt)
