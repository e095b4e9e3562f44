"""What gateways, the scheduler and the cache ask of a worker over the bus."""

import structlog

from pilotlight.common.bus import Subscription
from pilotlight.common.envelope import Timed
from pilotlight.common.errors import (
    ContextTooLong,
    EngineFailed,
    NoRoom,
    NotFound,
    NotLoaded,
    PilotlightError,
)
from pilotlight.common.messages.engine import Abort, Produced, Run
from pilotlight.common.messages.hold import Hold, WorkerHold, worker_hold_subject
from pilotlight.common.messages.pipelines import KvAt
from pilotlight.common.messages.room import (
    GivenUp,
    GiveUp,
    Lend,
    give_up_subject,
    lend_subject,
)
from pilotlight.common.messages.tokens import (
    Ack,
    Cancel,
    Resend,
    Submit,
    SubmitReply,
    TokenBatch,
    ack_subject,
    cancel_subject,
    resend_subject,
    submit_subject,
)
from pilotlight.common.telemetry import current_traceparent
from pilotlight.policy.ids import Digest
from pilotlight.policy.request import FinishReason, RequestKey, Vocabulary
from pilotlight.worker.core import WorkerCore
from pilotlight.worker.groups import Groups
from pilotlight.worker.held import ServingStage
from pilotlight.worker.held_table import RETRY_AFTER_S
from pilotlight.worker.stages import Stages
from pilotlight.worker.tracing import PrefillSpans

log = structlog.get_logger()


class Handlers:
    """One worker's subjects."""

    def __init__(
        self, core: WorkerCore, stages: Stages, groups: Groups, spans: PrefillSpans
    ) -> None:
        self._core = core
        self._groups = groups
        self._stages = stages
        self._spans = spans
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        """Listen."""
        bus, worker_id = self._core.bus, self._core.worker_id
        self._subscriptions = [
            await bus.serve(
                submit_subject(worker_id), Submit, self.submit, at_once=self.submit_at_once
            ),
            await bus.serve(resend_subject(worker_id), Resend, self.resend),
            await bus.serve(give_up_subject(worker_id), GiveUp, self.give_up),
            await bus.subscribe(lend_subject(worker_id), Lend, self.lend),
            await bus.subscribe(cancel_subject(worker_id), Cancel, self.cancel),
            await bus.hear(ack_subject(worker_id), Ack, self.acknowledge),
            await bus.subscribe(worker_hold_subject(worker_id), Timed[WorkerHold], self.hold),
        ]

    async def stop(self) -> None:
        """Listen no more."""
        subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            await subscription.end()

    async def submit(self, submit: Submit) -> SubmitReply:
        """Take a request, or say why not.

        The same submit again gets the same answer, and runs once.
        """
        key = RequestKey(submit.request_id, submit.attempt)
        if self._core.table.knows(key):
            return SubmitReply(accepted=True)
        trace_parent = current_traceparent()
        try:
            if not self._core.engine.alive:
                # It has died, and its death is still being told: what is accepted now would wait
                # for that.
                raise NotLoaded(f"the engine of {self._core.worker_id} has ended")
            serving = self._stages.held.serving(submit.instance_id)
            await self._make_room(submit, serving)
            if self._core.table.knows(key):
                # A repetition that came while the first one waited for room.
                return SubmitReply(accepted=True)
            superseded = self._core.table.accept(submit)
        except PilotlightError as error:
            self._core.metrics.refused.labels(code=error.code).inc()
            return SubmitReply(
                accepted=False,
                code=error.code,
                message=error.message,
                retry_after_s=error.retry_after_s or 0.0,
            )
        self._accepted(key, submit, trace_parent)
        deadline_s = self._deadline_s(submit)
        if submit.sampling.grammar is None:
            await self._run(submit, deadline_s)
        else:
            # The tokenizer may have to be fetched, which takes longer than a submit may wait for
            # its answer.
            text_digest = serving.hold.model.text_digest
            self._core.background.spawn(
                "run with a grammar", self._run_with_grammar(submit, deadline_s, text_digest)
            )
        await self._abort(superseded)
        return SubmitReply(accepted=True)

    def submit_at_once(self, submit: Submit) -> SubmitReply | None:
        """As ``submit``, for a request for which nothing has to be waited; None of any other."""
        core, key = self._core, RequestKey(submit.request_id, submit.attempt)
        held = self._stages.held.get(submit.instance_id)
        if (
            held is None
            or not held.serves
            or not core.engine.alive
            or submit.sampling.grammar is not None
            or core.table.knows(key)
            or core.table.has_attempts(submit.request_id)
            or _reach_tokens(submit, held.hold) > held.kv_capacity_tokens
        ):
            return None
        try:
            _check_room(submit, held.hold, held.kv_capacity_tokens)
            core.table.accept(submit)
        except PilotlightError:
            return None
        self._accepted(key, submit, current_traceparent())
        command = _command(submit, submit.deadline_in_s, held.kv_at(submit.moved_from))
        if not core.engine.run_soon(command):
            running = self._run(submit, self._deadline_s(submit))
            core.background.spawn("run a request", running)
        return SubmitReply(accepted=True)

    async def lend(self, lend: Lend) -> None:
        """Have these loans from now on, and no others."""
        self._stages.lending.lend(lend)

    async def resend(self, request: Resend) -> TokenBatch:
        """Give tokens again that were lost on the way."""
        self._core.metrics.resends.inc()
        entry = self._core.table.resend(request)
        return TokenBatch(worker_id=self._core.worker_id, entries=[] if entry is None else [entry])

    async def cancel(self, cancel: Cancel) -> None:
        """Drop requests that no client waits for."""
        await self._abort(self._core.table.cancel(cancel.gateway_id, cancel.request_ids))

    def acknowledge(self, ack: Ack) -> None:
        """Forget what has arrived."""
        now_s = self._core.clock.monotonic_s()
        done = [self._core.table.acknowledge(ack.gateway_id, entry, now_s) for entry in ack.entries]
        if abandoned := tuple([key for key in done if key is not None]):
            self._core.background.spawn("abort what is done with", self._abort(abandoned))

    async def hold(self, told: Timed[WorkerHold]) -> None:
        """Hold this from now on, and nothing else."""
        command = told.message
        if command.worker_id != self._core.worker_id:
            raise NotFound(f"this is {self._core.worker_id}, not {command.worker_id}")
        self._stages.command(command, told.sent_s(self._core.clock))
        self._groups.follow(self._stages.held)

    async def give_up(self, request: GiveUp) -> GivenUp:
        """Unload idle stages now."""
        return GivenUp(instance_ids=await self._stages.give_up(request.instance_ids))

    async def expire(self) -> None:
        """Give up the requests of silent gateways, and forget what no gateway asks for any more."""
        now_s = self._core.clock.monotonic_s()
        if not self._core.bus.connected:
            self._core.table.bus_was_down(now_s)
        await self._abort(self._core.table.expire(now_s))

    async def _make_room(self, submit: Submit, serving: ServingStage) -> None:
        """Have KV for a request that the engine could otherwise not take.

        Raises:
            ContextTooLong: no output fits into the model's context.
            NoRoom: the tokens that must be there to go on do not fit into the KV cache.
            NotLoaded: they do not now; when others have left the device, they may.
        """
        lending, held = self._stages.lending, self._stages.held[submit.instance_id]
        # What it has suffices for most; how much more it could have takes longer to say.
        room_tokens = held.kv_capacity_tokens
        if held_tokens_of(submit) > room_tokens:
            room_tokens = lending.limit_tokens(held)
        try:
            _check_room(submit, serving.hold, room_tokens)
        except NoRoom as error:
            began = submit.attempt > 1
            if began and held_tokens_of(submit) <= lending.alone_tokens(held):
                raise NotLoaded(error.message, retry_after_s=RETRY_AFTER_S) from error
            raise
        reach = _reach_tokens(submit, serving.hold)
        if reach > held.kv_capacity_tokens:
            await lending.reach(held, reach)

    def _accepted(self, key: RequestKey, submit: Submit, trace_parent: str) -> None:
        """The table has taken a request."""
        core = self._core
        core.table.shares.begin(key, core.clock.monotonic_s())
        core.metrics.accepted.add()
        core.make_way()
        self._spans.begin(key, submit.instance_id, trace_parent)

    def _deadline_s(self, submit: Submit) -> float | None:
        """Until when it must have ended, on this worker's clock."""
        in_s = submit.deadline_in_s
        return None if in_s is None else self._core.clock.monotonic_s() + in_s

    async def _run_with_grammar(
        self, submit: Submit, deadline_s: float | None, text_digest: Digest
    ) -> None:
        vocabulary = None
        try:
            vocabulary = await self._core.vocabularies.get(text_digest)
        except PilotlightError as error:
            # The engine ends the request, which may go on where the tokenizer can be had.
            log.warning(
                "no vocabulary",
                action="vocabulary_failed",
                request_id=submit.request_id,
                error=error.message,
            )
        key = RequestKey(submit.request_id, submit.attempt)
        if self._core.table.wants(key):
            await self._run(submit, deadline_s, vocabulary)
        else:
            # Cancelled meanwhile: the engine, which was told so too, never knew it.
            self._core.table.produced(_cancelled(submit), self._core.clock.monotonic_s())

    async def _run(
        self, submit: Submit, deadline_s: float | None, vocabulary: Vocabulary | None = None
    ) -> None:
        left_s = None if deadline_s is None else deadline_s - self._core.clock.monotonic_s()
        held = self._stages.held.get(submit.instance_id)
        kv_at = held.kv_at(submit.moved_from) if held is not None else None
        command = _command(submit, left_s, kv_at, vocabulary)
        try:
            await self._core.engine.run(command)
        except EngineFailed as error:
            # Accepted all the same: the engine's death ends it with an error entry, as it does
            # those that ran already.
            log.warning(
                "engine took no request",
                action="run_failed",
                request_id=submit.request_id,
                error=error.message,
            )

    async def _abort(self, keys: tuple[RequestKey, ...]) -> None:
        for key in keys:
            self._spans.end(key)
            try:
                await self._core.engine.abort(Abort(request_id=key.request_id, attempt=key.attempt))
            except EngineFailed:
                log.info(
                    "nothing to abort: the engine is gone",
                    action="abort_failed",
                    request_id=key.request_id,
                )


def _command(
    submit: Submit,
    deadline_in_s: float | None,
    kv_at: KvAt | None,
    vocabulary: Vocabulary | None = None,
) -> Run:
    return Run(
        request_id=submit.request_id,
        attempt=submit.attempt,
        instance_id=submit.instance_id,
        prompt_ids=submit.prompt_ids,
        output_ids=submit.output_ids,
        sampling=submit.sampling,
        vocabulary=vocabulary,
        deadline_in_s=deadline_in_s,
        kv_at=kv_at,
        share=submit.share,
        promise=submit.promise,
    )


def _cancelled(submit: Submit) -> Produced:
    return Produced(
        request_id=submit.request_id,
        attempt=submit.attempt,
        position=len(submit.output_ids),
        finish=FinishReason.CANCELLED,
    )


def held_tokens_of(submit: Submit) -> int:
    """Tokens that must be there to go on with a request."""
    return len(submit.prompt_ids) + len(submit.output_ids)


def _reach_tokens(submit: Submit, hold: Hold) -> int:
    """Tokens that a request may come to."""
    reach = len(submit.prompt_ids) + submit.sampling.max_tokens
    # A prompt that is pooled may fill the context, and its one token counts all the same.
    if submit.sampling.pooled is not None:
        return reach
    return min(reach, hold.model.spec.max_context_tokens)


def _check_room(submit: Submit, hold: Hold, kv_limit_tokens: int) -> None:
    """Refuse what the engine could never run, so that the gateway hears it within its submit.

    Raises:
        ContextTooLong: no output fits into the model's context.
        NoRoom: the tokens that must be there to go on do not fit into the KV cache.
    """
    held_tokens = held_tokens_of(submit)
    limit_tokens = hold.model.spec.max_context_tokens
    if submit.sampling.pooled is not None and len(submit.prompt_ids) > limit_tokens:
        raise ContextTooLong.by_prompt(limit_tokens, len(submit.prompt_ids), chat=False)
    if submit.sampling.pooled is None and len(submit.prompt_ids) >= limit_tokens:
        raise ContextTooLong(
            f"This model's maximum context length is {limit_tokens} tokens. However, the prompt has {len(submit.prompt_ids)} tokens, "
            "which leaves no room for an answer"
        )
    if held_tokens > kv_limit_tokens:
        raise NoRoom(
            f"{held_tokens} tokens do not fit into the {kv_limit_tokens} of this instance's KV cache"
        )
