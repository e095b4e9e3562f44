"""The facade: what the worker's engine child calls, in one thread, one call at a time."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from pilotlight.common.messages.engine import Produced
from pilotlight.engine import extension
from pilotlight.engine.channel.channel import Channel, wait_for_any
from pilotlight.engine.compute import GraphPlan
from pilotlight.engine.core.lifecycle import RequestEvent
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.core.request import Request
from pilotlight.engine.device.arena import CpuArena
from pilotlight.engine.device.arena_protocol import Arena
from pilotlight.engine.device.copying import Source
from pilotlight.engine.device.parameters import Early, Following
from pilotlight.engine.errors import BadCheckpoint, BadRequest, EngineError, StageBusy
from pilotlight.engine.grammar.client import GrammarHelper
from pilotlight.engine.held_stages import HeldStages
from pilotlight.engine.kv_moves import adopt, export, shared
from pilotlight.engine.kv_pieces import KvPiece
from pilotlight.engine.pipeline.entering import enter, shorten
from pilotlight.engine.pipeline_protocol import StageStep
from pilotlight.engine.resident import ResidentStage
from pilotlight.engine.resizing import resize
from pilotlight.engine.results import GrownStage, PlacedPart, Released, StageRoom, StepResult
from pilotlight.engine.sampling import ended, released
from pilotlight.engine.turn import run_batch, step_result
from pilotlight.policy.fairness import NO_TENANT, FairShare
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.model import Dtype, ModelSpec, Stage
from pilotlight.policy.request import FinishReason, Promise, RequestKey, Sampling, Vocabulary


class Engine:
    """Any number of resident stages on one device.

    ::

        begin_load ─> place_part (each part) ─> (connect) ─> add / abort / step ... ─> unload
                                                  extend ─> place_part (each further part)

    A whole model takes requests as soon as its load has begun: they run as far as parts are there.
    Refusals are raised where they are made. What was added ends in one ``Produced`` with a finish.
    """

    def __init__(
        self,
        threads: int,
        monotonic_s: Callable[[], float],
        limits: BatchLimits | None = None,
        arena: Arena | None = None,
    ) -> None:
        """Takes the process over for torch, whose number of threads is a setting of the process.

        Args:
            threads: that torch computes with.
            monotonic_s: the engine's clock, in seconds.
            limits: of the batches of every stage; None: the defaults.
            arena: the device's memory; None: a new arena in the host's.

        Raises:
            NoRoom: there are no addresses for an arena, if none is given.
        """
        torch.set_num_threads(threads)
        self._monotonic_s = monotonic_s
        self._limits = limits or BatchLimits()
        self.arena: Arena = arena or CpuArena()
        self._stages = HeldStages()
        self._grammars = GrammarHelper(monotonic_s)
        self._grown: list[GrownStage] = []
        """Stages that have all parts of their longer range; the next step reports them."""
        self._ended: list[Produced] = []
        """Ends that no forward pass brought about; the next step reports them."""

    @property
    def has_work(self) -> bool:
        """A step would do or report something.

        Requests that wait for parts are no work before they are overdue.
        """
        if self._ended or self._grown or self._stages.working:
            return True
        return (due_s := self.due_s) is not None and self._monotonic_s() >= due_s

    @property
    def due_s(self) -> float | None:
        """When there is work though nothing happens: the next deadline of what waits for parts."""
        return self._stages.due_s

    @property
    def rest_s(self) -> float:
        """See ``HeldStages.rest_s``; 0, too, where a step has something to report."""
        return 0.0 if self._ended or self._grown else self._stages.rest_s(self._monotonic_s())

    @property
    def channels(self) -> tuple[Channel, ...]:
        """To and from other stages: what comes by them is work."""
        return tuple(channel for stage in self._stages.values() for channel in stage.channels)

    @property
    def backed_bytes(self) -> int:
        """Memory of all stages, in whole pages: parameters, KV, and ``steps_bytes``."""
        return self.arena.backed_bytes

    @property
    def steps_bytes(self) -> int:
        """What of it captured steps read and write; no share of what stages have."""
        return sum(stage.memory.steps_bytes for stage in self._stages.values())

    def close(self) -> None:
        """Ends the grammar helper, if there is one; it also ends when this process does."""
        self._grammars.stop()

    def begin_load(
        self,
        instance_id: InstanceId,
        spec: ModelSpec,
        stage: Stage,
        dtype: Dtype,
        device_bytes: int,
        slot: int | None = None,
        plan: GraphPlan | None = None,
        *,
        may_grow: bool = False,
        early: Early | None = None,
    ) -> StageRoom:
        """Sets up a stage whose parts follow, and says how its bytes are divided.

        Args:
            instance_id: the stage's name from now on.
            spec: its model.
            stage: its layers.
            dtype: in which it runs.
            device_bytes: for its parameters and KV.
            slot: the model's own (``Model.slot``), in which it lies where that is free; None: any.
            plan: see ``compute_on``.
            may_grow: see ``room.divide``.
            early: parts whose copies begin as soon as it is set up.

        Raises:
            UnsupportedModel: no decoder runs it.
            NoRoom: ``device_bytes`` do not hold its parameters and one KV block.
            BadRequest: the instance is held already, or the model has no such stage.
        """
        if instance_id in self._stages:
            raise BadRequest(f"{instance_id} is held already")
        given = instance_id, spec, stage, dtype, device_bytes, self._limits, self.arena, slot, plan
        self._stages[instance_id] = resident = ResidentStage(*given, may_grow=may_grow, early=early)
        return resident.room

    def place_part(
        self,
        instance_id: InstanceId,
        part: int,
        tensors: Mapping[str, Source],
        following: Following | None = None,
    ) -> PlacedPart:
        """Copies one part; the last makes the stage ready. While no request waits for it, its parts
        give way to others' batches; those of one that grows, to its own.

        Args:
            instance_id: the stage's.
            part: as for ``Parameters.place``, as are the next two.
            tensors: of the part.
            following: the part that is placed next, if it has come.

        Raises:
            BadCheckpoint: the tensors are not those of this part. The stage can never be ready: its
                memory is free, its requests have ended, and it is not held. One that grows stays.
            UnknownInstance: no such load began, or it failed before.
            BadRequest: the stage has no such part; it stays.
        """
        resident = self._stages.held(instance_id)
        try:
            others_run = any(stage is not resident for stage in self._stages.working)
            behind = resident.grows or (others_run and not resident.in_flight)
            placed = resident.place(part, tensors, self._monotonic_s, following, background=behind)
        except BadCheckpoint:
            if not extension.call_off(resident):
                self.drop(instance_id)
            raise
        if placed.ready and extension.has_all(resident):
            self._grown.append(resident.grown)
        return placed

    def unload(self, instance_id: InstanceId) -> None:
        """Frees a stage, and all of its memory; nothing, if it is not held.

        Raises:
            StageBusy: requests are in flight on it. Nothing has changed.
        """
        if (resident := self._stages.get(instance_id)) is None:
            return
        if in_flight := resident.in_flight:
            raise StageBusy(f"{instance_id} has {in_flight} requests in flight")
        self._stages.free(instance_id)

    def drop(self, instance_id: InstanceId) -> None:
        """Ends the requests on a stage (``HeldStages.cancel_all``), and frees it."""
        if instance_id in self._stages:
            self._ended.extend(self._stages.cancel_all(instance_id))
            self._stages.free(instance_id)

    def resize(
        self,
        instance_id: InstanceId,
        device_bytes: int,
        *,
        must: bool = False,
        target_bytes: int = 0,
    ) -> StageRoom:
        """Gives a stage more bytes or fewer while it runs.

        Args:
            instance_id: the stage's.
            device_bytes: what it has from now on.
            must: others need the memory: KV does not grow, and what no longer fits alone ends.
            target_bytes: see ``resizing.resize``.

        Raises:
            UnknownInstance: it is not held.
            NoRoom: its parameters and what its requests may reach do not fit, or not on the device.
            StageBusy: it is one of a pipeline.
        """
        ended = self._ended if must else None
        return resize(self._stages.held(instance_id), device_bytes, ended, target_bytes)

    def extend(
        self, instance_id: InstanceId, stage: Stage, device_bytes: int, *, shorter: bool = False
    ) -> StageRoom:
        """As ``extension.begin``; a later step says that it has grown, or a follower has all."""
        return extension.begin(self._stages.held(instance_id), stage, device_bytes, shorter=shorter)

    def call_off(self, instance_id: InstanceId) -> bool:
        """As ``extension.call_off``; False of a stage that is not held."""
        return (held := self._stages.get(instance_id)) is not None and extension.call_off(held)

    def rename(self, instance_id: InstanceId, new_id: InstanceId) -> None:
        """See ``HeldStages.rename``."""
        self._stages.rename(instance_id, new_id)

    def connect(
        self, instance_id: InstanceId, before: Channel, behind: Channel, *, vouched: bool = True
    ) -> None:
        """Makes a stage one of a pipeline; the first one leads, when all have answered.

        Args:
            instance_id: the stage; parts may be missing.
            before: from the stage before, of the first stage from the last. The stage owns both.
            behind: to the next stage; for the last stage, to the first.
            vouched: its parts are in place, and were whole; else ``vouch`` says so later.

        Raises:
            UnknownInstance: it is not held.
            BadRequest: it is a whole model, or in a pipeline already.
            PeerLost: the next stage is gone already.
        """
        resident = self._stages.held(instance_id)
        resident.vouched |= vouched
        enter(resident, before, behind, self._monotonic_s())

    def shorten(
        self, instance_id: InstanceId, stage: Stage, before: Channel, behind: Channel
    ) -> None:
        """See ``entering.shorten``; ``UnknownInstance`` if it is not held."""
        shorten(self._stages.held(instance_id), stage, before, behind)

    def vouch(self, instance_id: InstanceId) -> None:
        """The parts that a stage has were whole when they were copied."""
        if (held := self._stages.get(instance_id)) is not None:
            held.vouched, held.target_vouched = True, held.parameters.complete

    def serves(self, instance_id: InstanceId) -> bool:
        """``add`` takes requests for it: a whole model, or the lead of a connected pipeline."""
        return (resident := self._stages.get(instance_id)) is not None and resident.serves

    def kv_capacity_tokens(self, instance_id: InstanceId) -> int:
        """Room that a stage can use, in a pipeline as all of its stages have; 0: it is not held."""
        held = self._stages.get(instance_id)
        return held.scheduler.kv_capacity_tokens if held is not None else 0

    def add(
        self,
        request_id: RequestId,
        attempt: int,
        instance_id: InstanceId,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        sampling: Sampling,
        deadline_s: float | None = None,
        pieces: Sequence[KvPiece] = (),
        vocabulary: Vocabulary | None = None,
        share: FairShare = NO_TENANT,
        promise: Promise | None = None,
    ) -> None:
        """Queues a request, or goes on with one that was moved here with its KV.

        Args:
            request_id: of the tokens.
            attempt: another one at the same request is another request here.
            instance_id: the model that runs it.
            prompt_ids: at least one token.
            output_ids: what another engine sampled already: positions go on after them.
            sampling: of tokens.
            deadline_s: on the engine's clock; a step after it ends it with ``deadline_exceeded``.
            pieces: what other engines had of it, of all layers; what they lack is computed here.
            vocabulary: the model's; a grammar needs it.
            share: its tenant's, of the turns.
            promise: of its model's SLO, from now on.

        Raises:
            UnknownInstance: no whole model of this name is held here, or with pieces: not in place.
            BadRequest: it makes no sense, has no room in the model's context, or is here already.
            NoRoom: it can never fit into the instance's KV cache; with pieces, also: not now.
            PeerLost: another stage did not take its share of the pieces.
            Overloaded: too many grammars are being compiled.
        """
        key = RequestKey(request_id, attempt)
        if self._stages.find(key) is not None:
            raise BadRequest(f"request {request_id}, attempt {attempt}, is here already")
        resident = self._stages.held(instance_id)
        request = Request(
            key, prompt_ids, output_ids, sampling, resident.spec.max_context_tokens, deadline_s
        )
        request.stands(share, promise, self._monotonic_s())
        resident.check(request)
        if request.exhausted:
            # Resumed after its last token, which its finish did not follow in time.
            self._ended.append(ended(request, FinishReason.LENGTH))
            return
        if sampling.grammar is not None:
            request.control = self._grammars.open(
                vocabulary, resident.spec.vocab_size, sampling.grammar, output_ids
            )
        if not pieces or request.reads_prompt:
            # A prompt that is scored or pooled runs from its first token on.
            request.queued_s = self._monotonic_s()
            resident.scheduler.submit(request)
            return
        try:
            adopt(resident, request, pieces, self._monotonic_s())
        except EngineError:
            request.release()
            raise

    def abort(self, request_id: RequestId, attempt: int) -> None:
        """Cancels a request; nothing, if it has ended."""
        if found := self._stages.find(RequestKey(request_id, attempt)):
            resident, request = found
            self._ended.append(resident.cancel(request))

    def export_kv(
        self, instance_id: InstanceId, keys: Sequence[RequestKey], layers: Stage, since: int = 0
    ) -> tuple[KvPiece, ...]:
        """As ``kv_moves.export``, of an instance that is held; ``UnknownInstance`` if not."""
        return export(self._stages.held(instance_id), keys, layers, since)

    def shared_kv(
        self, instance_id: InstanceId, token_ids: Sequence[int], layer: int, *, on_device: bool
    ) -> tuple[Stage, Tensor] | None:
        """As ``kv_moves.shared``; None also of an instance that is not held."""
        return shared(self._stages.get(instance_id), token_ids, layer, on_device=on_device)

    def release(self, request_id: RequestId, attempt: int) -> Released:
        """Lets a request go that goes on elsewhere, silently; ``BadRequest`` if it is not here."""
        if (found := self._stages.find(RequestKey(request_id, attempt))) is None:
            raise BadRequest(f"request {request_id}, attempt {attempt}, is not here")
        resident, request = found
        resident.scheduler.end(request, RequestEvent.DROP)
        return released(request)

    def prepare(self) -> bool:
        """See ``HeldStages.prepare``."""
        return self._stages.prepare()

    def wait(self, timeout_s: float) -> None:
        """Returns when there is work, or may be from another stage, or after the time."""
        if not self.has_work:
            wait_for_any(self.channels, timeout_s)

    def step(self) -> StepResult:
        """Ends what is overdue, runs one batch of the stage whose turn it is, says what ended."""
        start_s = self._monotonic_s()
        self._grammars.pump()
        produced, self._ended = self._ended, []
        grown, self._grown = self._grown, []
        produced.extend(one for stage in self._stages.values() for one in stage.expire(start_s))
        resident = self._stages.take_turn()
        alone = len(self._stages.working) == 1
        done = (
            run_batch(resident, self.arena, self._monotonic_s, may_wait=alone)
            if resident is not None
            else StageStep()
        )
        produced.extend(done.produced)
        step_time_s = self._monotonic_s() - (start_s if done.began_s is None else done.began_s)
        return step_result(self._stages.values(), resident, done, produced, grown, step_time_s)
