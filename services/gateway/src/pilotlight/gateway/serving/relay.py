"""Everything between this gateway and workers about running requests: submit, token batches,
acknowledgement, resend, cancel.

Core NATS may drop a batch, so positions are checked, a gap or a long silence is asked about, and
workers keep what is not acknowledged. What a request does when its attempt is lost is not decided
here (``requests``).
"""

import asyncio
import random
from collections import defaultdict

import structlog

from pilotlight.common.bus import Bus, Subscription
from pilotlight.common.clock import Clock
from pilotlight.common.envelope import Timed
from pilotlight.common.errors import PilotlightError, WorkerLost
from pilotlight.common.messages.tokens import (
    AckEntry,
    Resend,
    Submit,
    SubmitReply,
    TokenBatch,
    TokenEntry,
    resend_subject,
    submit_subject,
    tokens_subject,
)
from pilotlight.common.service import Background
from pilotlight.common.waiting import Backoff, Wake, cancel_all, pause
from pilotlight.gateway.serving.fleet import Fleet
from pilotlight.gateway.serving.post import Post
from pilotlight.gateway.serving.token_log import Token, TokenLog
from pilotlight.policy.ids import GatewayId, InstanceId, RequestId, WorkerId
from pilotlight.policy.request import FinishReason

log = structlog.get_logger()

SUBMIT_DEADLINE_S = 0.5
RESEND_DEADLINE_S = 0.5
MAX_RESENDS = 12
"""Unanswered or fruitless resends in a row, with backoff, before the attempt is given up."""
ACK_INTERVAL_S = 1.0
MAX_STRAYS = 1024
"""Strays of one worker that are remembered."""
PROBE_AFTER_S = 1.0
"""Silence after which a running request is asked about: its last batch may be the one that was
lost."""
MAX_PROBE_AFTER_S = 8.0


class Attempt:
    """One try at a request on one instance, whichever of its workers leads.

    ``arrived`` wakes its request's task.
    """

    def __init__(
        self,
        request_id: RequestId,
        number: int,
        worker_id: WorkerId,
        instance_id: InstanceId,
        start_seq: int,
        now_s: float,
    ) -> None:
        self.request_id = request_id
        self.number = number
        self.worker_id = worker_id
        """The instance's lead, as it was last looked up (``Relay._lead``)."""
        self.former_leads: list[WorkerId] = []
        self.instance_id = instance_id
        self.prompt_tokens = self.max_tokens = 0
        """Of its request, as its worker was told; of the output, what it may come to."""
        self.accepted = False
        self.error: PilotlightError | None = None
        self.heard_s = now_s
        self.first_heard_s: float | None = None
        self.first_sampled_s: float | None = None
        """When its worker had what was heard first, as far as it says so."""
        self.probe_after_s = PROBE_AFTER_S
        self.resending: asyncio.Task[None] | None = None
        self.log = TokenLog(start_seq)
        self._arrived = Wake()

    async def next(self, at_most_s: float) -> list[Token]:
        """Tokens that have arrived; none when ``at_most_s`` passed, or at the end (``finish`` is
        then set).

        Raises:
            PilotlightError: the attempt is lost, and every token that came before that has been
                taken.
        """
        arrived, received = self._arrived, self.log
        arrived.clear()
        fresh = received.fresh()
        if fresh or received.finish is not None:
            return fresh
        if self.error is not None:
            raise self.error
        await arrived.wait(at_most_s)
        return received.fresh()

    async def news(self, at_most_s: float) -> bool:
        """Wait until ``next`` has something to say; False when ``at_most_s`` passed first."""
        if self.first_heard_s is not None or self.error is not None:
            return True
        return await self._arrived.wait(max(0.0, at_most_s))

    @property
    def finish(self) -> FinishReason | None:
        """Why the engine ended it; None while it runs."""
        return self.log.finish

    def heard(self, now_s: float, sampled_s: float) -> None:
        """News of it came: tokens that were sampled then."""
        self.heard_s = now_s
        if self.first_heard_s is None:
            self.first_heard_s, self.first_sampled_s = now_s, sampled_s
        self.accepted = True
        self.probe_after_s = PROBE_AFTER_S
        self._arrived.set()

    def fail(self, error: PilotlightError) -> None:
        """It is lost."""
        if self.error is None and self.finish is None:
            self.error = error
            self._arrived.set()


class Relay:
    """Running attempts of this gateway; a component."""

    def __init__(
        self, bus: Bus, clock: Clock, background: Background, fleet: Fleet, gateway_id: GatewayId
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._background = background
        self._fleet = fleet
        self._gateway_id = gateway_id
        self._attempts: dict[RequestId, Attempt] = {}
        self._mail = Wake()
        self._post = Post(bus, gateway_id, self._mail)
        self._strays: defaultdict[WorkerId, dict[tuple[RequestId, int], AckEntry]] = defaultdict(
            dict
        )
        self._rng = random.Random()
        self._subscription: Subscription | None = None
        self._sender: asyncio.Task[None] | None = None
        fleet.on_lost(self._on_worker_lost)

    @property
    def running(self) -> int:
        """Attempts that are under way."""
        return len(self._attempts)

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """Those."""
        return tuple(self._attempts.values())

    async def start(self) -> None:
        """Listen to tokens."""
        if self._subscription is None:
            self._bus.on_reconnect(self._after_reconnect)
            self._subscription = await self._bus.hear(
                tokens_subject(self._gateway_id), Timed[TokenBatch], self._on_batch, binary=True
            )
            self._sender = self._background.spawn("acknowledge tokens", self._send_for_ever())

    async def stop(self) -> None:
        """Cancel what still runs and listen no more."""
        if self._subscription is None or self._sender is None:
            return
        for attempt in list(self._attempts.values()):
            self.close(attempt)
        await cancel_all((self._sender,))
        await self._post.send()
        await self._subscription.end()
        self._subscription = None

    def open(
        self,
        request_id: RequestId,
        number: int,
        worker_id: WorkerId,
        instance_id: InstanceId,
        start_seq: int,
    ) -> Attempt:
        """Begin an attempt: its tokens may come before the reply to its submit.

        Args:
            request_id: of the choice.
            number: of the attempt: tokens of others are ignored.
            worker_id: the worker that the request is handed to.
            instance_id: the instance that computes.
            start_seq: the position of the first token that is wanted: those before it came from
                earlier attempts.
        """
        attempt = Attempt(
            request_id, number, worker_id, instance_id, start_seq, self._clock.monotonic_s()
        )
        self._attempts[request_id] = attempt
        return attempt

    async def submit(self, attempt: Attempt, message: Submit, worker_id: WorkerId) -> SubmitReply:
        """Hand an attempt to the worker that computes its prompt.

        Raises:
            DeadlineExceeded: no answer in time; it may have been accepted all the same.
            BusUnavailable: no worker answers.
            MessageTooLarge: prompt and output are beyond what the bus takes.
        """
        lead = self._fleet.lead_of(message.instance_id) or worker_id
        attempt.prompt_tokens = len(message.prompt_ids)
        attempt.max_tokens = message.sampling.max_tokens
        reply = await self._bus.request(
            submit_subject(lead), message, SubmitReply, deadline_s=SUBMIT_DEADLINE_S
        )
        if reply.accepted:
            attempt.accepted = True
            attempt.heard_s = self._clock.monotonic_s()
        return reply

    def close(self, attempt: Attempt, *, ended: bool = True) -> None:
        """Let go of an attempt. Never waits.

        Its worker may forget it, and stops it when it still runs. With ``ended`` its request is
        over, and is cancelled by name when it still runs; without, another attempt may follow on
        the same worker, which a cancel would hit.
        """
        if self._attempts.get(attempt.request_id) is attempt:
            del self._attempts[attempt.request_id]
        if attempt.resending is not None:
            attempt.resending.cancel()
        for worker_id in (self._lead(attempt), *attempt.former_leads):
            done = _done(attempt.request_id, attempt.number, attempt.log.next_seq)
            self._post.acknowledge(worker_id, done)
            if ended and attempt.finish is None:
                self._post.cancel(worker_id, attempt.request_id)
        if attempt.finish is None:
            self._post.now()
        else:
            self._post.soon()

    def _lead(self, attempt: Attempt) -> WorkerId:
        """Where messages about an attempt go: to the worker that leads its instance now.

        What came of it before stays as it is.
        """
        lead = self._fleet.lead_of(attempt.instance_id)
        if lead is not None and lead != attempt.worker_id:
            attempt.former_leads = [
                one for one in (*attempt.former_leads, attempt.worker_id) if one != lead
            ]
            attempt.worker_id = lead
        return attempt.worker_id

    # What arrives.

    def _on_batch(self, told: Timed[TokenBatch]) -> None:
        sampled_s, batch = told.sent_s(self._clock), told.message
        now_s = self._clock.monotonic_s()
        for entry in batch.entries:
            self._take(batch.worker_id, entry, now_s, sampled_s)

    def _take(self, worker_id: WorkerId, entry: TokenEntry, now_s: float, sampled_s: float) -> None:
        attempt = self._attempts.get(entry.request_id)
        if attempt is None or attempt.number != entry.attempt:
            self._stray(worker_id, entry)
            return
        if attempt.log.offer(entry):
            attempt.heard(now_s, sampled_s)
        if attempt.log.gap:
            self._ask_again(attempt)

    def _stray(self, worker_id: WorkerId, entry: TokenEntry) -> None:
        """Tokens of an attempt that ended here: its worker did not hear so, and is told again
        within a second.
        """
        strays = self._strays[worker_id]
        if len(strays) < MAX_STRAYS:
            strays[entry.request_id, entry.attempt] = _done(entry.request_id, entry.attempt, 0)

    def _on_worker_lost(self, worker_id: WorkerId, error: PilotlightError) -> None:
        for attempt in self._attempts.values():
            if self._lead(attempt) == worker_id:
                attempt.fail(error)

    # Resend.

    async def _after_reconnect(self) -> None:
        for attempt in list(self._attempts.values()):
            if attempt.accepted and attempt.finish is None:
                self._ask_again(attempt)

    def _ask_again(self, attempt: Attempt) -> None:
        if attempt.resending is None or attempt.resending.done():
            attempt.resending = self._background.spawn(
                "ask for tokens again", self._resend(attempt)
            )

    async def _resend(self, attempt: Attempt) -> None:
        backoff = Backoff(first_s=0.05, limit_s=1.0)
        failures = 0
        while attempt.finish is None and attempt.error is None:
            answered, from_seq = False, attempt.log.next_seq
            lead = self._lead(attempt)
            message = Resend(
                request_id=attempt.request_id, attempt=attempt.number, from_seq=from_seq
            )
            try:
                reply = await self._bus.request(
                    resend_subject(lead), message, TokenBatch, deadline_s=RESEND_DEADLINE_S
                )
            except PilotlightError as error:
                if lead != self._lead(attempt):
                    continue  # The new lead is to be asked.
                # What was asked for came meanwhile, and was acknowledged: no wonder that it is not
                # there any more.
                if not error.retryable and attempt.log.next_seq == from_seq:
                    attempt.fail(
                        WorkerLost(
                            f"worker {attempt.worker_id} no longer knows the request: {error.message}"
                        )
                    )
                    return
            else:
                answered = True
                attempt.heard_s = now_s = self._clock.monotonic_s()
                for entry in reply.entries:
                    self._take(lead, entry, now_s, now_s)
            if not attempt.log.gap and (answered or attempt.log.next_seq > from_seq):
                return
            if not self._bus.connected:
                # NATS cannot be reached: that says nothing about the worker.
                failures = 0
            failures += 1
            if failures > MAX_RESENDS:
                attempt.fail(
                    WorkerLost(
                        f"worker {attempt.worker_id} does not send the tokens that are missing"
                    )
                )
                return
            await pause(backoff.delay_s(failures, self._rng))

    def _probe_silent(self) -> None:
        now_s = self._clock.monotonic_s()
        for attempt in self._attempts.values():
            if (
                attempt.accepted
                and attempt.finish is None
                and now_s - attempt.heard_s >= attempt.probe_after_s
            ):
                attempt.probe_after_s = min(2 * attempt.probe_after_s, MAX_PROBE_AFTER_S)
                self._ask_again(attempt)

    # Acknowledge and cancel.

    async def _send_for_ever(self) -> None:
        next_ack_s = self._clock.monotonic_s() + ACK_INTERVAL_S
        while True:
            await self._mail.wait(max(0.0, next_ack_s - self._clock.monotonic_s()))
            if self._clock.monotonic_s() >= next_ack_s:
                next_ack_s = self._clock.monotonic_s() + ACK_INTERVAL_S
                self._acknowledge()
                self._probe_silent()
            await self._post.send()

    def _acknowledge(self) -> None:
        for worker_id, strays in self._strays.items():
            self._post.acknowledge(worker_id, *strays.values())
        self._strays.clear()
        for attempt in self._attempts.values():
            if attempt.first_heard_s is not None:
                # Also when nothing is new: the last one may have been lost, and a worker gives up a
                # gateway that is silent.
                entry = AckEntry(
                    request_id=attempt.request_id, attempt=attempt.number, seq=attempt.log.next_seq
                )
                self._post.acknowledge(self._lead(attempt), entry)


def _done(request_id: RequestId, number: int, seq: int) -> AckEntry:
    return AckEntry(request_id=request_id, attempt=number, seq=seq, done=True)
