"""One engine child of a build: a model loaded into it, prompts run through it, what that took."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pilotlight.common.clock import Clock, moment_of
from pilotlight.common.errors import EngineFailed, error_of
from pilotlight.common.messages.engine import (
    EngineUp,
    LoadStage,
    PlacePart,
    Run,
    StageFailed,
    StageLoaded,
    StageOpened,
    StageUnloaded,
    StepDone,
    UnloadStage,
)
from pilotlight.common.messages.graphs import (
    GraphsRecorded,
    KernelsRecorded,
    Precomputed,
    StageGraphs,
    StageKernels,
)
from pilotlight.common.waiting import cancel_all, within
from pilotlight.policy.coverage import LoadSeconds, load_seconds, seconds_of
from pilotlight.policy.ids import InstanceId, RequestId, WorkerId
from pilotlight.policy.model import Model, Stage
from pilotlight.policy.phase import Moment, Phase, PhaseName
from pilotlight.policy.request import FinishReason, Sampling
from pilotlight.worker.engines.client import EngineClient, EngineDied, EngineEvent
from pilotlight.worker.leasing import PartLease, PartSource

INSTANCE = InstanceId("build")
EVENT_S = 300.0
"""Between two words of an engine that has something to do."""
PART_S = 300.0


@dataclass(slots=True)
class Outcome:
    """What became of some requests that ran together."""

    outputs: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    steps: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    """Of each step that ran something, its tokens and its seconds."""

    @property
    def seconds(self) -> float:
        """Of all steps."""
        return sum(seconds for _, seconds in self.steps)


class BuildSession:
    """A fresh engine and the one model in it. Ends with ``close``, or with its task."""

    def __init__(
        self, engine: EngineClient, source: PartSource, worker_id: WorkerId, clock: Clock
    ) -> None:
        self._engine = engine
        self._source = source
        self._worker_id = worker_id
        self._clock = clock
        self._events = aiter(engine.events())
        self._runs = 0
        self.recorded: GraphsRecorded | None = None
        """What came of ``load`` with ``record``."""
        self.graphs: StageGraphs | None = None
        """What the engine said last of graphs that it restores."""
        self.kernels: StageKernels | None = None
        """The same of compiled kernels."""
        self.took = LoadSeconds()
        """The last ``load``, by the phases that a start has: those of the engine, and the lease of
        the parts. What they waited for on their way into the host pool is in none of them."""

    async def start(self) -> EngineUp:
        """Start the engine.

        Raises:
            EngineFailed: it does not start.
        """
        return await self._engine.start()

    async def close(self) -> None:
        """End the engine."""
        await self._engine.stop()

    async def load(
        self,
        model: Model,
        device_bytes: int,
        artifact: bytes = b"",
        graphs: str = "",
        record: str = "",
        precomputed: Precomputed | None = None,
        layers: Stage | None = None,
    ) -> int:
        """Load a model.

        Args:
            model: which.
            device_bytes: for parameters and KV.
            artifact: what it is restored from.
            graphs: where its archive of graphs is. All graphs that are restored are proved.
            record: where an archive of graphs is to be written.
            precomputed: what there is of compiled kernels, and of graphs of ranges; None: nothing.
            layers: no others of the model; None: all.

        Returns:
            Room for tokens.

        Raises:
            PilotlightError: parts cannot be had, or the engine does not take them.
        """
        precomputed, stage = precomputed or Precomputed(), layers or model.spec.whole
        parts, self.graphs = model.spec.parts_of(stage), None
        restores = bool(artifact) and stage == model.spec.whole
        asked_s = self._clock.monotonic_s()
        lease = await self._source.lease(self._worker_id, INSTANCE, model, parts)
        async with lease:
            sent = moment_of(self._clock)
            leased = _leased(asked_s, sent, PhaseName.RESTORE if restores else PhaseName.INIT)
            await self._engine.load_stage(
                LoadStage(
                    instance_id=INSTANCE,
                    model=model,
                    stage=stage,
                    device_bytes=device_bytes,
                    pool_path=lease.pool_path,
                    artifact=artifact,
                    graphs=graphs,
                    prove=bool(graphs or (artifact and precomputed.ranges)),
                    record=record,
                    precomputed=precomputed,
                ),
                sent,
            )
            loading = asyncio.create_task(self._loaded(leased), name="loading for a build")
            feeding = asyncio.create_task(self._feed(lease), name="parts for a build")
            try:
                await asyncio.wait({loading, feeding}, return_when=asyncio.FIRST_COMPLETED)
                if feeding.done():
                    feeding.result()
                return await loading
            finally:
                await cancel_all((loading, feeding))

    async def unload(self) -> KernelsRecorded | None:
        """Let the model go; what came of its compiled kernels, if that was asked for.

        Raises:
            EngineFailed: the engine ended.
        """
        await self._engine.unload_stage(UnloadStage(instance_id=INSTANCE))
        while True:
            event = await self._next()
            if isinstance(event, StageUnloaded):
                return event.kernels

    async def run(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, later: Sequence[Sequence[int]] = ()
    ) -> Outcome:
        """Run prompts together to their ends, with the most probable tokens.

        Args:
            prompts: that are there from the beginning.
            max_tokens: of each output.
            later: those that come when the first token is there.

        Raises:
            EngineFailed: the engine ended, or refused one.
        """
        self._runs += 1
        outcome = Outcome()
        sampling = Sampling(seed=0, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        names = [f"build-{self._runs}-{index}" for index in range(len(prompts) + len(later))]
        outcome.outputs = {name: [] for name in names}
        first, rest = names[: len(prompts)], names[len(prompts) :]
        await self._add(dict(zip(first, prompts, strict=True)), sampling)
        left = set(names)
        while left:
            event = await self._next()
            if isinstance(event, StepDone):
                left -= _note(event, outcome)
                if rest and any(outcome.outputs.values()):
                    await self._add(dict(zip(rest, later, strict=True)), sampling)
                    rest = []
        return outcome

    async def _add(self, prompts: Mapping[str, Sequence[int]], sampling: Sampling) -> None:
        for name, prompt in prompts.items():
            await self._engine.run(
                Run(
                    request_id=RequestId(name),
                    attempt=1,
                    instance_id=INSTANCE,
                    prompt_ids=list(prompt),
                    output_ids=[],
                    sampling=sampling,
                )
            )

    async def _feed(self, lease: PartLease) -> None:
        frames = aiter(lease)
        while (ready := await within(PART_S, anext(frames, None), "the next part")) is not None:
            place = PlacePart(instance_id=INSTANCE, part=ready.part, tensors=ready.tensors)
            await self._engine.place_part(place, ready.ready)

    async def _loaded(self, leased: Phase) -> int:
        room_tokens = 0
        while True:
            event = await self._next()
            if isinstance(event, StageOpened):
                room_tokens = event.kv_capacity_tokens
            elif isinstance(event, StageLoaded):
                self.recorded = event.recorded
                phases = (leased, *event.phases)
                self.took = load_seconds(seconds_of(phases, leased.wall_offset_s))
                return event.kv_capacity_tokens or room_tokens
            elif isinstance(event, StageFailed):
                raise error_of(event.code, event.message)

    async def _next(self) -> EngineEvent:
        told = await within(EVENT_S, anext(self._events, None), "an engine's word")
        if told is None:
            raise EngineFailed("the engine of the build was ended")
        event = told.message
        if isinstance(event, EngineDied):
            raise error_of(event.code, f"the engine of the build ended: {event.reason}")
        if isinstance(event, StageGraphs) and not event.uses:
            self.graphs = event
        if isinstance(event, StageKernels) and not event.settled:
            self.kernels = event
        return event


def _leased(asked_s: float, sent: Moment, name: PhaseName) -> Phase:
    """The first phase of a load, as a start has it (``worker.loading``)."""
    return Phase(
        name=name,
        start_s=asked_s,
        end_s=sent.at_s,
        wall_offset_s=sent.wall_offset_s,
        process="worker",
        detail="lease",
    )


def _note(step: StepDone, outcome: Outcome) -> set[str]:
    """What a step did; the requests that it ended.

    Raises:
        EngineFailed: one was refused.
    """
    ended: set[str] = set()
    if step.batch_tokens:
        outcome.steps.append((step.batch_tokens, step.step_time_s))
    for one in step.produced:
        if one.request_id not in outcome.outputs:
            continue
        outcome.outputs[one.request_id].extend(one.token_ids)
        if one.finish is FinishReason.ERROR:
            raise EngineFailed(f"a prompt of the build was refused: {one.code}: {one.message}")
        if one.finish is not None:
            ended.add(one.request_id)
    return ended


class MakeEngine(Protocol):
    """Makes an engine, not started."""

    def __call__(
        self, *, device_bytes: int, record_images: bool, note_kernels: bool, witness: bool
    ) -> EngineClient:
        """See ``ChildOptions``."""
        ...


class MakeSession(Protocol):
    """Makes an engine for one step of a build, not started."""

    def __call__(
        self, *, record_images: bool = False, note_kernels: bool = False, witness: bool = False
    ) -> BuildSession:
        """See ``ChildOptions``; the engine is slower with images."""
        ...
