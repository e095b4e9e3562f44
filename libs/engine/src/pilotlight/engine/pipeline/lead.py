"""Stage 0 of a pipeline: it plans the micro-batches, runs its own layers, and hands out what the
last stage sampled.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from pilotlight.engine.channel.channel import Channel, wait_for_any
from pilotlight.engine.core.batch import Plan, Segment
from pilotlight.engine.core.blocks import BLOCK_TOKENS
from pilotlight.engine.core.request import Request
from pilotlight.engine.errors import BadRequest, EngineError, PeerLost, PeerSilent
from pilotlight.engine.extension import take_over
from pilotlight.engine.kv_pieces import KvPiece
from pilotlight.engine.pipeline.borrowing import BorrowedParts
from pilotlight.engine.pipeline.frames import (
    HiddenStates,
    KvCopied,
    LeaderRuns,
    PartLent,
    RequestsClosed,
    SampledTokens,
    StageHello,
    StageRefuses,
    StagesUp,
    header_of,
    kv_frame,
    pack,
    unpack,
)
from pilotlight.engine.pipeline.growth import Growth, GrowthState
from pilotlight.engine.pipeline.meeting import blocks_of, hello_of
from pilotlight.engine.pipeline.opened import OpenRequests
from pilotlight.engine.pipeline.planning import NextMicroBatch, runs
from pilotlight.engine.pipeline.shorter import ShorterRing
from pilotlight.engine.pipeline.under_way import UnderWay
from pilotlight.engine.pipeline_protocol import StageStep
from pilotlight.engine.resident import ResidentStage
from pilotlight.engine.resizing import limit_blocks, use_all
from pilotlight.engine.sampling import look_up, settle, wait_for_late
from pilotlight.policy.model import Stage
from pilotlight.policy.request import RequestKey

LOOK_OUT_S = 0.002
"""How long a step with nothing to run watches for an answer: an abort waits no longer than that."""
ANSWER_TIMEOUT_S = 60.0
"""A stage that holds a micro-batch up for longer hangs."""
SEND_TIMEOUT_S = 5.0
"""A stage has taken nothing for this long, though fewer frames than a channel's window are under
way."""


class PipelineLead:
    """Keeps as many micro-batches under way as there are stages, so that each has one to run."""

    def __init__(
        self, resident: ResidentStage, answers: Channel, forward: Channel, now_s: float
    ) -> None:
        """Says hello.

        Args:
            resident: stage 0.
            answers: from the last stage.
            forward: to stage 1.
            now_s: on the engine's clock.

        Raises:
            PeerLost: stage 1 is gone already.
        """
        self._resident = resident
        self._answers = answers
        self._forward = forward
        self._depth = 0
        """Micro-batches that may be under way; 0 until all stages are known."""
        self._under_way: deque[UnderWay] = deque()
        self._number = 0
        self._open = OpenRequests()
        """What the other stages know."""
        self._heard_s = now_s
        self._stages: tuple[Stage, ...] = ()
        """What the other stages run; one that runs nothing any more is not among them."""
        self._growth: Growth | None = None
        self._shorter: ShorterRing | None = None
        self._unwanted = 0
        """KV blocks on their way here for a ring that came to nothing."""
        self._size = 0
        """Stages that were connected."""
        self._next = NextMicroBatch(resident)
        self._borrowed = resident.parameters.neighbour = BorrowedParts(resident)
        self._loading = False
        """Parts of other stages may be missing: none has answered."""
        # What was computed before is not in place in the stages that come now.
        resident.scheduler.forget_cached()
        hello = pack(StagesUp(stages=(hello_of(resident, resident.stage),)))
        self._forward.send(hello, SEND_TIMEOUT_S)

    @property
    def has_work(self) -> bool:
        # Both are looked at in any case: what a socket did not take leaves then.
        heard = [channel.readable for channel in self.channels]
        forms = self._shorter is not None and self._shorter.due
        if self.waits or not self._resident.complete:
            return forms or any(heard) or (self._depth > len(self._under_way) and self._next.can_go)
        return (
            not self._depth
            or bool(self._open)
            or self._grows
            or self._borrowed.due
            or self._resident.scheduler.has_work
            or any(heard)
            or forms
        )

    @property
    def waits(self) -> bool:
        return self._loading and self._growth is None

    @property
    def _grows(self) -> bool:
        return self._growth is not None and self._growth.due

    @property
    def in_flight(self) -> int:
        return 0

    @property
    def leads(self) -> bool:
        return self._depth > 0

    @property
    def channels(self) -> tuple[Channel, ...]:
        beside = self._shorter.channels if self._shorter is not None else ()
        return self._answers, self._forward, *beside

    @property
    def awaits_others(self) -> bool:
        return self._growth is None

    @property
    def num_blocks(self) -> int:
        return self._resident.scheduler.kv_capacity_tokens // BLOCK_TOKENS

    def placed(self, key: RequestKey) -> Segment | None:
        request = self._resident.scheduler.find(key)
        return self._resident.scheduler.placed(request) if request is not None else None

    def forward(self, segment: Segment, pieces: Sequence[KvPiece]) -> None:
        for piece in pieces:
            self._forward.send(kv_frame(segment, piece), SEND_TIMEOUT_S)
        if self._growth is not None:
            self._growth.wrote((segment,))

    def grow(self, stage: Stage | None) -> None:
        self._drop_shorter()
        self._growth = Growth(self._resident, stage) if stage is not None else None

    def shorten(self, stage: Stage, before: Channel, behind: Channel) -> None:
        if self._growth is not None and self._growth.state is GrowthState.HANDING_OVER:
            raise BadRequest(f"{self._resident.instance_id} is about to be a shorter pipeline")
        self._drop_shorter()
        self._shorter = ShorterRing(self._resident, stage, before, behind)

    def close(self) -> None:
        self._borrowed.close()
        for channel in self.channels:
            channel.close()

    def step(self, monotonic_s: Callable[[], float], *, may_wait: bool) -> StageStep:
        """One micro-batch out, if there is one, and everything in that has come."""
        try:
            if self._forward.readable:
                sent = type(unpack(self._forward.receive(0))).__name__
                raise PeerLost(f"stage 1 sent {sent} backwards")
            paused = self._growth is not None and self._growth.paused
            plan = (
                self._dispatch(monotonic_s)
                if self._depth > len(self._under_way) and not paused
                else None
            )
            unformed = self._form()
            self._ask(monotonic_s())
            if plan is None and may_wait and not self._answers.readable:
                wait_for_late(self._resident.scheduler.requests)
                wait_for_any(self.channels, LOOK_OUT_S)
            done = replace(self._collect(plan, monotonic_s), unformed=unformed)
            if self._resident.pipeline is None:
                return done
            if not self._under_way and (closed := self._open.close_gone()):
                self._forward.send(pack(RequestsClosed(keys=closed)), SEND_TIMEOUT_S)
            return done
        except PeerLost as error:
            return self._lose(error)

    def _dispatch(self, monotonic_s: Callable[[], float]) -> Plan | None:
        """Plans, runs and sends the next micro-batch; None if none can be sent now."""
        now_s = monotonic_s()
        given = self._next.take(now_s, self._depth)
        if given is None:
            return None
        plan, hidden = given
        if not self._under_way:
            self._heard_s = now_s
        self._number += 1
        header = HiddenStates(
            number=self._number,
            keys=tuple(request.key for request in plan.requests),
            segments=plan.batch.segments,
            closed=self._open.close_gone(),
            opened=tuple(
                opened for request in plan.requests for opened in self._open.introduce(request)
            ),
            tensor=header_of(hidden),
            allowed=look_up(plan.sampled),
            busy_s=0.0,
        )
        self._resident.scheduler.advance(plan)
        if self._growth is not None:
            self._growth.wrote(plan.batch.segments)
        frame = pack(header, hidden)  # What was computed is here now.
        sampled = tuple((request, request.takes) for request in plan.sampled)
        sent_s = None if self._under_way else monotonic_s()
        self._under_way.append(UnderWay(self._number, sampled, sent_s))
        self._forward.send(frame, SEND_TIMEOUT_S)
        return plan

    def _ask(self, now_s: float) -> None:
        """Takes the next steps of a growth, if there are any."""
        while (frame := self._borrowed.next_frame()) is not None:
            self._forward.send(frame, SEND_TIMEOUT_S)
        while self._growth is not None and (frame := self._growth.next_frame()) is not None:
            if not self._under_way:
                self._heard_s = now_s
            self._forward.send(frame, SEND_TIMEOUT_S)

    def _form(self) -> EngineError | None:
        """Goes on with the ring of a shorter pipeline, if one is to form; why none does."""
        ring = self._shorter
        try:
            if ring is not None and ring.look():
                self._growth = Growth(self._resident, ring.stage, ring)
        except PeerLost as error:
            if self._growth is not None and self._growth.state is GrowthState.HANDING_OVER:
                raise  # The others have given their layers up.
            self._drop_shorter()
            return error
        return None

    def _drop_shorter(self) -> None:
        """The ring that runs goes on."""
        if self._shorter is None:
            return
        if self._growth is not None and self._growth.ring is self._shorter:
            self._unwanted += self._growth.asked
            self._growth = None
        self._shorter.close()
        self._shorter = None

    def _collect(self, plan: Plan | None, monotonic_s: Callable[[], float]) -> StageStep:
        step = StageStep(plan=plan)
        while self._answers.readable:
            try:
                given = self._take_answer(plan, monotonic_s)
            except PeerLost as error:
                return self._lose(error, step)
            step = replace(
                given,
                produced=step.produced + given.produced,
                first_prefill=step.first_prefill or given.first_prefill,
            )
            if given.grown:
                return step
        # A stage that loads fails by itself where no parts come, and hangs up.
        waits = (
            (self._under_way and not self.waits)
            or (not self._depth and self._resident.complete)
            or (self._growth is not None and self._growth.waits)
        )
        if waits and monotonic_s() - self._heard_s > ANSWER_TIMEOUT_S:
            raise PeerSilent(
                f"the stages behind {self._resident.instance_id} have not answered for {ANSWER_TIMEOUT_S} s"
            )
        return step

    def _take_answer(self, plan: Plan | None, monotonic_s: Callable[[], float]) -> StageStep:
        frame = self._answers.receive(0)
        answer = unpack(frame)
        self._heard_s = monotonic_s()
        match answer:
            case StagesUp() if not self._depth:
                self._meet(answer.stages)
            case SampledTokens() if self._under_way:
                return self._hand_out(plan, answer, self._heard_s)
            case KvCopied() if self._unwanted:
                self._unwanted -= 1
            case KvCopied() if self._growth is not None:
                self._growth.take_in(answer, frame)
            case PartLent():
                self._borrowed.take_in(answer)
            case LeaderRuns() if self._growth is not None and answer.stop == self._growth.stop:
                return self._take_over(plan, answer.stop)
            case StageRefuses():
                raise PeerLost(answer.message)
            case _:
                raise PeerLost(f"the last stage sent {type(answer).__name__} out of turn")
        return StageStep(plan=plan)

    def _hand_out(self, plan: Plan | None, answer: SampledTokens, now_s: float) -> StageStep:
        """Gives out a micro-batch's tokens.

        A request that lost its blocks meanwhile gets none: it samples the same one again.
        """
        done = self._under_way.popleft()
        # It has gone through all stages, so all of them have their parts.
        self._loading = False
        self._next.answered()
        if answer.number != done.number or len(answer.sampled) != len(done.sampled):
            raise PeerLost(
                f"the last stage answered micro-batch {answer.number}, not {done.number}"
            )
        known = zip(done.sampled, answer.sampled, strict=True)
        current = [
            (request, sampled) for (request, takes), sampled in known if runs(request, takes)
        ]
        requests: list[Request] = [request for request, _ in current]
        sampled = settle(requests, [sampled for _, sampled in current])
        given = self._resident.hand_out(plan, requests, sampled, now_s)
        # Else others were in its way, or stages that run nothing any more passed it on.
        alone = not self._under_way and self._depth == self._size
        return replace(given, hop_s=done.hop_s(answer, now_s, self._size) if alone else 0.0)

    def _meet(self, stages: Sequence[StageHello]) -> None:
        """Learns what the stages are; ``PeerLost`` if they are not one model."""
        limit_blocks(self._resident, blocks_of(self._resident, stages))
        self._depth = self._size = len(stages)
        self._loading = any(hello.loading for hello in stages[1:])
        self._stages = tuple(hello.stage for hello in stages[1:])
        self._borrowed.meet(stages)

    def _take_over(self, plan: Plan | None, stop: int) -> StageStep:
        """Runs the layers up to here from now on, or goes on in the ring of a shorter pipeline. A
        leader that has all of them needs no pipeline.
        """
        self._growth = None
        if self._resident.target is not None:
            take_over(self._resident)
        if self._shorter is not None:
            self._go_round(self._shorter)
            return StageStep(plan=plan, grown=True)
        self._stages = tuple(
            Stage(max(stage.start, stop), stage.stop) for stage in self._stages if stage.stop > stop
        )
        self._depth = 1 + len(self._stages)
        if not self._stages:
            self.close()
            self._resident.pipeline = None
            use_all(self._resident)
        return StageStep(plan=plan, grown=True)

    def _go_round(self, ring: ShorterRing) -> None:
        """The ring of a shorter pipeline is this one from now on; nothing is under way in either.
        Its stages know no request yet.
        """
        self._shorter = None
        self.close()
        self._answers, self._forward = ring.channels
        self._stages = tuple(hello.stage for hello in ring.stages[1:])
        self._depth = self._size = len(ring.stages)
        self._open.clear()
        self._borrowed.meet(ring.stages)
        limit_blocks(self._resident, ring.num_blocks)

    def _go_on_alone(self, error: EngineError, so_far: StageStep) -> StageStep:
        """Runs the whole model, though its KV is lost: all requests run again, as far as parts are
        in place.
        """
        self.close()
        self._resident.pipeline = None
        take_over(self._resident)
        self._resident.scheduler.preempt_all()
        use_all(self._resident)
        return replace(so_far, lost=error, grown=self._resident.target is None)

    def _lose(self, error: EngineError, so_far: StageStep | None = None) -> StageStep:
        """Ends every request of the pipeline; the stage itself stays, and can join another one.

        A leader that is to have the whole model goes on alone instead. ``so_far`` is what the step
        gave before.
        """
        so_far = so_far or StageStep()
        if self._resident.target == self._resident.spec.whole:
            return self._go_on_alone(error, so_far)
        resident, grown = self._resident, self._resident.target is not None
        if grown:
            take_over(resident)
            grown = resident.target is None
        produced = [resident.cancel(request, error) for request in resident.scheduler.requests]
        self.close()
        self._resident.pipeline = None
        return replace(so_far, produced=(*so_far.produced, *produced), lost=error, grown=grown)
