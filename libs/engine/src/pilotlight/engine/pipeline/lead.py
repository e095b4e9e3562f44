"""Stage 0 of a pipeline: it plans the micro-batches, runs its own layers, and hands out what the
last stage sampled.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pilotlight.common.messages.engine import Produced
from pilotlight.engine.channel.channel import Channel, wait_for_any
from pilotlight.engine.core.batch import Plan, Segment
from pilotlight.engine.core.lifecycle import RequestEvent
from pilotlight.engine.core.request import Request
from pilotlight.engine.errors import EngineError, PeerLost, PeerSilent
from pilotlight.engine.extension import take_over
from pilotlight.engine.kv_pieces import KvPiece
from pilotlight.engine.pipeline.frames import (
    HiddenStates,
    KvBlocks,
    KvCopied,
    LeaderRuns,
    OpenedRequest,
    RequestsClosed,
    SampledTokens,
    StageHello,
    StageRefuses,
    StagesUp,
    header_of,
    pack,
    unpack,
)
from pilotlight.engine.pipeline.growth import Growth
from pilotlight.engine.pipeline.planning import NextMicroBatch, runs
from pilotlight.engine.pipeline_protocol import StageStep
from pilotlight.engine.resident import ResidentStage
from pilotlight.engine.resizing import limit_blocks, use_all
from pilotlight.engine.sampling import ended, look_up, settle, wait_for_late
from pilotlight.policy.model import Stage
from pilotlight.policy.request import FinishReason, RequestKey

LOOK_OUT_S = 0.002
"""How long a step with nothing to run watches for an answer: an abort waits no longer than that."""
ANSWER_TIMEOUT_S = 60.0
"""A stage that holds a micro-batch up for longer hangs."""
SEND_TIMEOUT_S = 5.0
"""A stage has taken nothing for this long, though fewer frames than a channel's window are under
way."""


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A micro-batch that the other stages have not answered yet."""

    number: int
    sampled: tuple[tuple[Request, int], ...]
    """Requests that get a token, and which of their runs this is."""
    sent_s: float | None = None
    """When it left, on the engine's clock; None: behind another one."""


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
        self._under_way: deque[_UnderWay] = deque()
        self._number = 0
        self._open: dict[RequestKey, tuple[Request, int]] = {}
        """Requests that the other stages know, and by which of their runs. One that left and came
        back is another one."""
        self._heard_s = now_s
        self._stages: tuple[Stage, ...] = ()
        """What the other stages run; one that runs nothing any more is not among them."""
        self._growth: Growth | None = None
        self._size = 0
        """Stages that were connected."""
        self._next = NextMicroBatch(resident)
        self._loading = False
        """Parts of other stages may be missing: none has answered."""
        # What was computed before is not in place in the stages that come now.
        resident.scheduler.forget_cached()
        hello = StageHello(
            stage=resident.stage,
            spec=resident.spec,
            dtype=resident.dtype,
            num_blocks=resident.num_blocks,
        )
        self._forward.send(pack(StagesUp(stages=(hello,))), SEND_TIMEOUT_S)

    @property
    def has_work(self) -> bool:
        # Both are looked at in any case: what a socket did not take leaves then.
        heard = [channel.readable for channel in self.channels]
        if self.waits or not self._resident.complete:
            return any(heard) or (self._depth > len(self._under_way) and self._next.can_go)
        return (
            not self._depth
            or bool(self._open)
            or self._grows
            or self._resident.scheduler.has_work
            or any(heard)
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
        return self._answers, self._forward

    def placed(self, key: RequestKey) -> Segment | None:
        request = self._resident.scheduler.find(key)
        return self._resident.scheduler.placed(request) if request is not None else None

    def forward(self, segment: Segment, pieces: Sequence[KvPiece]) -> None:
        for piece in pieces:
            tensor = piece.keys_and_values.contiguous()
            header = KvBlocks(
                key=piece.key,
                layers=piece.layers,
                blocks=segment.blocks,
                start=piece.start,
                tensor=header_of(tensor),
            )
            self._forward.send(pack(header, tensor), SEND_TIMEOUT_S)

    def grow(self, stage: Stage | None) -> None:
        """See ``Pipeline.grow``; the stage has memory for it."""
        self._growth = Growth(self._resident, stage) if stage is not None else None

    def close(self) -> None:
        self._answers.close()
        self._forward.close()

    def step(self, monotonic_s: Callable[[], float], *, may_wait: bool) -> StageStep:
        """One micro-batch out, if there is one, and everything in that has come."""
        try:
            if self._forward.readable:
                raise PeerLost(
                    f"stage 1 sent {type(unpack(self._forward.receive(0))).__name__} backwards"
                )
            paused = self._growth is not None and self._growth.paused
            plan = (
                self._dispatch(monotonic_s)
                if self._depth > len(self._under_way) and not paused
                else None
            )
            self._ask_for_kv(monotonic_s())
            if plan is None and may_wait and not self._answers.readable:
                wait_for_late(self._resident.scheduler.requests)
                wait_for_any(self.channels, LOOK_OUT_S)
            done = self._collect(plan, monotonic_s)
            if self._resident.pipeline is None:
                return done
            if not self._under_way and (closed := self._close_gone()):
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
            closed=self._close_gone(),
            opened=tuple(
                self._introduce(request)
                for request in plan.requests
                if request.key not in self._open
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
        self._under_way.append(_UnderWay(self._number, sampled, sent_s))
        self._forward.send(frame, SEND_TIMEOUT_S)
        return plan

    def _ask_for_kv(self, now_s: float) -> None:
        """Takes the next step of a growth, if there is one."""
        if self._growth is not None and (frame := self._growth.next_frame()) is not None:
            if not self._under_way:
                self._heard_s = now_s
            self._forward.send(frame, SEND_TIMEOUT_S)

    def _close_gone(self) -> tuple[RequestKey, ...]:
        """Forgets the requests that own no blocks any more, or own others since."""
        gone = tuple(
            key for key, (request, takes) in self._open.items() if not runs(request, takes)
        )
        for key in gone:
            del self._open[key]
        return gone

    def _introduce(self, request: Request) -> OpenedRequest:
        self._open[request.key] = request, request.takes
        prompt_ids, output_ids = (
            request.token_ids[: request.prompt_tokens],
            request.token_ids[request.prompt_tokens :],
        )
        return OpenedRequest(request.key, tuple(prompt_ids), tuple(output_ids), request.sampling)

    def _collect(self, plan: Plan | None, monotonic_s: Callable[[], float]) -> StageStep:
        step = StageStep(plan=plan)
        while self._answers.readable:
            try:
                given = self._take_answer(plan, monotonic_s)
            except PeerLost as error:
                return self._lose(error, step)
            step = StageStep(
                plan=plan,
                produced=step.produced + given.produced,
                first_prefill=step.first_prefill or given.first_prefill,
                grown=given.grown,
                hop_s=given.hop_s,
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
            case KvCopied() if self._growth is not None:
                self._growth.take_in(answer, frame)
            case LeaderRuns() if (
                self._growth is not None and answer.stop == self._growth.target.stop
            ):
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
        return replace(given, hop_s=self._hop_s(done, answer, now_s))

    def _hop_s(self, done: _UnderWay, answer: SampledTokens, now_s: float) -> float:
        """Of one that went round alone; 0 where that is not known."""
        if done.sent_s is None or self._under_way or answer.busy_s is None:
            return 0.0
        if self._depth != self._size:  # Stages that run nothing any more pass it on, too.
            return 0.0
        return max(0.0, (now_s - done.sent_s - answer.busy_s) / self._size)

    def _meet(self, stages: Sequence[StageHello]) -> None:
        """Learns what the stages are, and how many blocks all of them have.

        Raises:
            PeerLost: they are not one model.
        """
        resident, stop = self._resident, 0
        for hello in stages:
            if (
                hello.stage.start != stop
                or hello.spec != resident.spec
                or hello.dtype is not resident.dtype
            ):
                raise PeerLost(
                    f"stage [{hello.stage.start}, {hello.stage.stop}) does not follow on layer {stop} of one model"
                )
            stop = hello.stage.stop
        if stop != resident.spec.num_layers or len(stages) < 2:
            raise PeerLost(f"the stages end at layer {stop} of {resident.spec.num_layers}")
        limit_blocks(resident, min(hello.num_blocks for hello in stages))
        self._depth = self._size = len(stages)
        self._loading = any(hello.loading for hello in stages[1:])
        self._stages = tuple(hello.stage for hello in stages[1:])

    def _take_over(self, plan: Plan | None, stop: int) -> StageStep:
        """Runs the layers up to here from now on. A leader that has all of them needs no
        pipeline.
        """
        self._growth = None
        take_over(self._resident)
        self._stages = tuple(
            Stage(max(stage.start, stop), stage.stop) for stage in self._stages if stage.stop > stop
        )
        self._depth = 1 + len(self._stages)
        if not self._stages:
            self.close()
            self._resident.pipeline = None
            use_all(self._resident)
        return StageStep(plan=plan, grown=True)

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
        if self._resident.target is not None:
            take_over(self._resident)
        scheduler = self._resident.scheduler
        produced: list[Produced] = []
        for request in scheduler.requests:
            scheduler.end(request, RequestEvent.DROP)
            produced.append(ended(request, FinishReason.ERROR, error))
        self.close()
        self._resident.pipeline = None
        return replace(so_far, produced=(*so_far.produced, *produced), lost=error)
