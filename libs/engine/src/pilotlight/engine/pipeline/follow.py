"""A stage behind stage 0: it runs what comes, and passes on what it computed; the last one samples
the tokens.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from pilotlight.engine.channel.channel import Channel, Frame
from pilotlight.engine.core.batch import Segment
from pilotlight.engine.core.blocks import blocks_for
from pilotlight.engine.core.request import Request
from pilotlight.engine.device.sampler import SampledToken
from pilotlight.engine.errors import BadRequest, EngineError, PeerLost
from pilotlight.engine.extension import leave_pipeline, take_over
from pilotlight.engine.kv_pieces import KvPiece, check_pieces
from pilotlight.engine.pipeline.arriving import ArrivingLayers
from pilotlight.engine.pipeline.checks import check_batch, check_blocks
from pilotlight.engine.pipeline.frames import (
    HiddenStates,
    KvBlocks,
    KvCopied,
    KvWanted,
    LeaderRuns,
    OpenedRequest,
    PartLent,
    PartWanted,
    RequestsClosed,
    SampledTokens,
    StageRefuses,
    StagesUp,
    header_of,
    pack,
    settled,
    tensor_of,
    unpack,
)
from pilotlight.engine.pipeline.lending import LentParts, copy_of
from pilotlight.engine.pipeline.meeting import hello_of
from pilotlight.engine.pipeline.shorter import NextPlace, keep_copy
from pilotlight.engine.pipeline_protocol import StageStep
from pilotlight.engine.resident import ResidentStage
from pilotlight.engine.resizing import limit_blocks
from pilotlight.engine.sampling import sample_allowed
from pilotlight.policy.model import Stage
from pilotlight.policy.request import RequestKey

SEND_TIMEOUT_S = 60.0
"""The next stage may be in the middle of a long batch."""


class PipelineFollower:
    """Owns no books: the blocks of each request come with each micro-batch.

    While its parts come, one micro-batch waits for them here, and the frames behind it in the
    channel. What it computed leaves when its parts are vouched for, and not before: the stage that
    leads knows nothing of them.
    """

    def __init__(
        self,
        resident: ResidentStage,
        before: Channel,
        behind: Channel,
        leaving: tuple[Channel, ...] = (),
    ) -> None:
        """Joins.

        Args:
            resident: the stage.
            before: from the stage before.
            behind: to the next one; from the last stage, to stage 0.
            leaving: of a longer ring that is over; the leader may not know that yet.
        """
        self._resident = resident
        self._before = before
        self._behind = behind
        self._is_last = resident.stage.stop == resident.spec.num_layers
        self._layers: Stage | None = resident.stage
        """What it runs; None: the leader has taken everything over, and it passes on what comes."""
        self._over = False
        """The leader has all layers, and hangs up."""
        self._segments: dict[RequestKey, Segment] = {}
        """What is in place of each request that the leader has open."""
        self._requests: dict[RequestKey, Request] = {}
        """Their tokens, on the last stage."""
        self._blocks = resident.num_blocks
        """As many as this stage and those before it have."""
        self._next: NextPlace | None = None
        """In the ring of a shorter pipeline."""
        self._leaving = leaving
        self._arriving = ArrivingLayers(resident)
        self._lent = LentParts(resident)
        self._waiting: HiddenStates | None = None
        """The micro-batch that waits for parts."""
        self._kept: Frame | None = None
        """What was computed, and is not vouched for yet."""
        self._spent_s: Callable[[], float] | None = None
        """Since this step began; None of a micro-batch that waited for parts."""

    @property
    def has_work(self) -> bool:
        # Both are looked at in any case: what a socket did not take leaves then.
        before, behind, *ahead = [channel.readable for channel in self._own_channels]
        self._hang_up()
        aside = (
            behind or any(ahead) or self._lent.due or (self._next is not None and self._next.due)
        )
        if self._kept is not None:
            return self._resident.vouched or aside or self._before.lost
        if self._waiting is not None:
            return self._arriving.can_go or aside or self._before.lost
        return before or aside

    @property
    def waits(self) -> bool:
        return False

    @property
    def in_flight(self) -> int:
        return len(self._segments)

    @property
    def leads(self) -> bool:
        return False

    @property
    def channels(self) -> tuple[Channel, ...]:
        return *self._own_channels, *self._leaving

    @property
    def _own_channels(self) -> tuple[Channel, ...]:
        ahead = self._next.channels if self._next is not None else ()
        return self._before, self._behind, *ahead

    @property
    def awaits_others(self) -> bool:
        return False

    @property
    def num_blocks(self) -> int:
        return self._blocks

    def placed(self, key: RequestKey) -> Segment | None:
        return self._segments.get(key)

    def forward(self, segment: Segment, pieces: Sequence[KvPiece]) -> None:
        raise PeerLost("only the stage that leads takes requests in")

    def grow(self, stage: Stage | None) -> None:
        """Nothing changes before the pipeline ends (``extension``)."""

    def shorten(self, stage: Stage, before: Channel, behind: Channel) -> None:
        if self._over:
            raise BadRequest(f"{self._resident.instance_id} is about to leave its pipeline")
        if self._next is not None:
            self._next.close()
        self._next = NextPlace(self._resident, stage, before, behind)

    def close(self) -> None:
        for channel in self.channels:
            channel.close()

    def step(self, monotonic_s: Callable[[], float], *, may_wait: bool) -> StageStep:
        """Takes one frame."""
        unformed = self._look_ahead()
        try:
            if self._behind.readable:
                raise PeerLost(
                    f"the stage behind sent {type(unpack(self._behind.receive(0))).__name__} backwards"
                )
            for answer in self._lent.answers():
                self._send(answer)
            if self._kept is not None or self._waiting is not None:
                self._spent_s = None
                self._go_on()
            elif self._before.readable:
                began_s = monotonic_s()
                self._spent_s = lambda: monotonic_s() - began_s
                self._take(self._before.receive(0))
        except PeerLost as error:
            return self._leave(None if self._over else error)
        except EngineError as error:
            # The leader sent what does not fit this stage: it is told, so that it does not wait for
            # an answer.
            refusal = PeerLost(
                f"stage [{self._resident.stage.start}, {self._resident.stage.stop}): {error.message}"
            )
            self._refuse(refusal)
            return self._leave(refusal)
        return StageStep(unformed=unformed)

    def _look_ahead(self) -> PeerLost | None:
        """Goes on with the ring of a shorter pipeline, if one is to form; why none does."""
        if self._next is not None and not self._over:
            try:
                self._next.look()
            except PeerLost as error:
                self._next.close()
                self._next = None
                return error
        return None

    def _go_round(self, place: NextPlace) -> None:
        """Has its place from now on. The old ring is open until the leader has heard of it."""
        resident = self._resident
        if resident.target is not None:
            take_over(resident)
        limit_blocks(resident, resident.num_blocks)
        old = self._before, self._behind
        resident.pipeline = PipelineFollower(resident, *place.channels, leaving=old)

    def _hang_up(self, *, told: bool = False) -> None:
        """Lets go of a longer ring, where the leader goes on in this one."""
        gone = [channel.lost for channel in self._leaving]  # What was not taken leaves then.
        if told or any(gone):
            for channel in self._leaving:
                channel.close()
            self._leaving = ()

    def _take(self, frame: Frame) -> None:
        header = unpack(frame)
        match header:
            case StagesUp():
                resident = self._resident
                loading = not (resident.complete and resident.vouched)
                stages = (*header.stages, hello_of(resident, resident.stage, loading=loading))
                self._blocks = min(hello.num_blocks for hello in stages)
                self._send(pack(StagesUp(stages=stages)))
            case HiddenStates():
                self._run(header, frame)
            case RequestsClosed():
                self._close_requests(header.keys)
                if not self._is_last:
                    self._send(frame)
            case KvBlocks():
                self._store(header, tensor_of(frame, header.tensor), frame)
            case KvWanted():
                self._copy(header, frame)
            case PartWanted():
                for answer in self._lent.ask(header, frame, is_last=self._is_last):
                    self._send(answer)
            case PartLent():
                self._send(frame)
            case KvCopied():
                # Some come in a ring that has just taken the place of a longer one.
                if self._layers is None or not keep_copy(
                    self._resident, self._layers, header, frame
                ):
                    self._send(frame)
            case LeaderRuns():
                self._give_up(header.stop)
                self._send(frame)
                if self._over and self._next is not None and self._next.answered:
                    self._go_round(self._next)
            case StageRefuses():
                raise PeerLost(header.message)
            case SampledTokens():
                raise PeerLost("sampled tokens came to a stage that does not lead")

    def _run(self, header: HiddenStates, frame: Frame) -> None:
        self._hang_up(told=True)
        check_batch(header, self._resident.num_blocks)
        known = self._requests.keys() - set(header.closed) | {one.key for one in header.opened}
        if self._is_last and not known.issuperset(header.keys):
            raise PeerLost("a micro-batch has requests that were not opened")
        self._close_requests(header.closed)
        for opened in header.opened:
            self._open(opened)
        for key, segment in zip(header.keys, header.segments, strict=True):
            self._segments[key] = Segment(0, segment.stop, segment.blocks, wants_logits=False)
        if self._layers is None:
            self._send(frame)
            return
        self._arriving.begin(header.batch, tensor_of(frame, header.tensor), self._layers)
        self._waiting = header
        self._go_on()

    def _go_on(self) -> None:
        """Runs the micro-batch that is here as far as it can, and sends what came of it.

        Raises:
            PeerLost: the stage before is gone: nobody waits for the answer.
        """
        if self._kept is None and self._waiting is not None:
            assert self._layers is not None, "layers are taken over from stages that have all parts"
            computed = self._arriving.go(self._layers)
            if computed is not None:
                header, self._waiting = self._waiting, None
                self._kept = self._answer(header, computed)
        if self._kept is not None and self._resident.vouched:
            answer, self._kept = self._kept, None
            self._send(answer)
        elif self._before.lost:
            raise PeerLost("the stage before is gone")

    def _answer(self, header: HiddenStates, computed: Tensor) -> Frame:
        """What the next stage gets of a micro-batch; the first one the tokens.

        Raises:
            PeerLost: the leader's books are not ours.
        """
        if not self._is_last:
            computed = settled(computed)
            passed = HiddenStates(
                number=header.number,
                keys=header.keys,
                segments=header.segments,
                opened=header.opened,
                closed=header.closed,
                tensor=header_of(computed),
                allowed=header.allowed,
                busy_s=self._busy_s(header),
            )
            return pack(passed, computed)
        wanting = zip(header.keys, header.segments, strict=True)
        requests = [self._requests[key] for key, segment in wanting if segment.wants_logits]
        if len(requests) != len(header.allowed):
            raise PeerLost("a micro-batch has more requests than it says what they allow, or fewer")
        sampled = sample_allowed(computed, requests, header.allowed, self._resident.sample)
        for request, token in zip(requests, sampled, strict=True):
            if isinstance(token, SampledToken):
                request.accept(token.token_id)
        return pack(
            SampledTokens(number=header.number, sampled=tuple(sampled), busy_s=self._busy_s(header))
        )

    def _busy_s(self, header: HiddenStates) -> float | None:
        """What this stage and those before it took with a micro-batch."""
        if header.busy_s is None or self._spent_s is None:
            return None
        return header.busy_s + self._spent_s()

    def _close_requests(self, keys: Sequence[RequestKey]) -> None:
        for key in keys:
            self._segments.pop(key, None)
            self._requests.pop(key, None)

    def _open(self, opened: OpenedRequest) -> None:
        if self._is_last:
            self._requests[opened.key] = Request(
                opened.key,
                opened.prompt_ids,
                opened.output_ids,
                opened.sampling,
                self._resident.spec.max_context_tokens,
            )

    def _store(self, header: KvBlocks, keys_and_values: Tensor, frame: Frame) -> None:
        """Keeps what is of this stage's layers; what is of later ones goes on."""
        layers = self._layers
        piece = KvPiece(
            key=header.key,
            layers=header.layers,
            start=header.start,
            keys_and_values=keys_and_values,
        )
        check_pieces([piece], self._resident.spec, self._resident.dtype)
        check_blocks(header.blocks, self._resident.num_blocks)
        if len(header.blocks) < blocks_for(piece.stop):
            raise PeerLost(f"{len(header.blocks)} KV blocks come for {piece.stop} positions")
        if layers is not None and (mine := piece.cut(layers, piece.start, piece.stop)):
            self._resident.kv.write(mine.layers, header.blocks, mine.start, mine.keys_and_values)
        if not self._is_last:
            self._send(frame)

    def _copy(self, wanted: KvWanted, frame: Frame) -> None:
        """Gives blocks of one of this stage's layers to the leader; a question about another layer
        goes on.
        """
        check_blocks(wanted.blocks, self._resident.num_blocks)
        if self._layers is None or not self._layers.start <= wanted.layer < self._layers.stop:
            if self._is_last:
                raise PeerLost(f"the leader wants layer {wanted.layer}, which no stage runs")
            self._send(frame)
            return
        self._send(copy_of(self._resident, wanted))

    def _give_up(self, leader_stop: int) -> None:
        """Runs what the leader does not run. The memory of the rest stays until it is unloaded."""
        self._over = leader_stop == self._resident.spec.num_layers
        if self._layers is not None and leader_stop > self._layers.start:
            stop = self._layers.stop
            self._layers = Stage(leader_stop, stop) if leader_stop < stop else None

    def _send(self, frame: Frame) -> None:
        self._behind.send(frame, SEND_TIMEOUT_S)

    def _refuse(self, error: PeerLost) -> None:
        try:
            self._send(pack(StageRefuses(message=error.message)))
        except PeerLost:
            return  # The stage behind is gone, too.

    def _leave(self, error: PeerLost | None = None) -> StageStep:
        """Leaves the pipeline; the stage stays, with its longer range if it was to have one."""
        self.close()
        leave_pipeline(self._resident)
        return StageStep(left=error is None, lost=error)
