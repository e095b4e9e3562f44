"""The stages that a worker holds: brings what is held to what is desired, and is the only one to write it."""

import asyncio
import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from pilotlight.common.clock import moment_of
from pilotlight.common.errors import DeadlineExceeded, EngineFailed, NoRoom, NotLoaded, PilotlightError, StaleCommand, error_of
from pilotlight.common.messages.engine import StageFailed, StageLoaded, StageOpened, UnloadStage
from pilotlight.common.messages.hold import Hold, WorkerHold
from pilotlight.common.newest import Newest
from pilotlight.common.waiting import within
from pilotlight.policy.coverage import departed_s
from pilotlight.policy.types import Epoch, Generation, HeldStage, HeldState, InstanceId, Moment
from pilotlight.worker.core import WorkerCore
from pilotlight.worker.lifecycle import RESIDENT, HeldEvent, HeldView, plan, step
from pilotlight.worker.loading import StageLoader

log = structlog.get_logger()

UNLOAD_DEADLINE_S = 10.0
"""So long whoever asks for room is kept waiting for it: an engine frees memory between two steps, of which one may take long."""
LOST_UNLOAD_S = 300.0
"""An engine that has freed no memory by then has lost the command; one that hangs its own watch finds much earlier."""
RETRY_AFTER_S = 0.5
GONE_KEPT = 1024
"""Instances that were given up or drained and are remembered, so that a late command does not load them again."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Held:
    hold: Hold
    state: HeldState
    since_s: float
    reason: str = ""
    kv_capacity_tokens: int = 0
    open: bool = False
    """The engine has made room: it takes requests."""
    placed: Moment | None = None
    """When its last part was in its place."""
    loading: asyncio.Task[None] | None = None
    loaded: asyncio.Future[StageLoaded] | None = None
    """What the engine says of the load."""
    overdue_s: float = math.inf
    """When its requests are to go on elsewhere, if it drains."""
    unloaded: asyncio.Future[None] | None = None
    """Done when the engine has freed it; set while that is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingStage:
    """A stage that takes requests."""

    hold: Hold
    kv_capacity_tokens: int


class Stages:
    """Owns the table of held stages of one worker.

    ``settled`` is called with a stage that takes requests while it loads, once its load has ended: with an error if it is not ready
    then, and its requests have to go on elsewhere.
    """

    def __init__(
        self, core: WorkerCore, loader: StageLoader, settled: Callable[[InstanceId, PilotlightError | None], None]
    ) -> None:
        self._core = core
        self._loader = loader
        self._settled = settled
        self._held: dict[InstanceId, _Held] = {}
        self._gone: OrderedDict[InstanceId, Generation] = OrderedDict()
        self._unloading: defaultdict[InstanceId, deque[asyncio.Future[None]]] = defaultdict(deque)
        """Unloads that the engine was asked for and has not confirmed, in order."""
        self._engine_deaths = 0
        self._desired: tuple[Hold, ...] | None = None
        """None until the first command: absence is never deletion."""
        self._epoch = Epoch(0)
        self._newest = Newest()

    @property
    def epoch(self) -> Epoch:
        """The highest epoch that a command carried."""
        return self._epoch

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens for which the stages that serve have room, all together."""
        return sum(held.kv_capacity_tokens for held in self._held.values() if held.state is HeldState.READY)

    @property
    def busy(self) -> bool:
        """Some request waits for nothing but the engine."""
        return any(self._core.table.in_flight(one) for one, held in self._held.items() if held.state is not HeldState.LOADING)

    def unproven(self, instance_id: InstanceId) -> bool:
        """Every part is in its place, and it has not been found yet that all of them were whole when they were copied."""
        held = self._held.get(instance_id)
        return held is not None and held.state is HeldState.LOADING and held.loaded is not None and held.loaded.done()

    def command(self, command: WorkerHold) -> None:
        """Take the complete desired set.

        Raises:
            StaleCommand: a higher epoch has been seen, here or by the node's loader.
        """
        self._epoch = max(self._epoch, self._loader.pool_epoch())
        if command.epoch < self._epoch:
            self._core.metrics.stale.inc()
            raise StaleCommand(f"epoch {command.epoch} is older than {self._epoch}")
        self._epoch = command.epoch
        if not self._newest.is_news(command.worker_id, str(command.epoch), command.seq):
            return
        self._desired = command.holds
        self.reconcile(departed_s(command.sent, moment_of(self._core.clock)))

    def reconcile(self, asked_s: float | None = None) -> None:
        """Do what is missing between held and desired; nothing, when nothing is. ``asked_s`` is when that was asked for: now,
        unless it is a command that does.
        """
        if self._desired is None:
            return
        views = {instance_id: HeldView(hold=held.hold, state=held.state) for instance_id, held in self._held.items()}
        todo = plan(views, self._gone, self._desired, self._core.device_bytes)
        for hold in todo.renew:
            self._held[hold.instance_id].hold = hold
        removed = [self._let_go(instance_id) for instance_id in todo.let_go]
        if self._core.engine.alive:
            for hold in todo.start:
                self._start(hold, asked_s)
        for hold in todo.refuse:
            held = self._hold(hold)
            self._fail(held, NoRoom(f"{hold.device_bytes} bytes were granted, and the device has no such room"))
        if todo.renew or todo.let_go or todo.start or todo.refuse:
            self._core.changed.set()
        if any(removed):
            # A newer generation may have waited for the place.
            self.reconcile(asked_s)

    async def give_up(self, instance_ids: Sequence[InstanceId]) -> tuple[InstanceId, ...]:
        """Unload these if they are ready and idle; returns the ones whose memory is free, also of an earlier call."""
        freed: list[InstanceId] = []
        leaving: list[_Held] = []
        for instance_id in instance_ids:
            held = self._held.get(instance_id)
            if held is None and instance_id in self._gone:
                freed.append(instance_id)
            elif held is not None and held.state is HeldState.EVICTED:
                leaving.append(held)
            elif held is not None and held.state is HeldState.READY and self._core.table.in_flight(instance_id) == 0:
                # From here on submits are refused: no request can slip in between.
                self._move(held, HeldEvent.GIVE_UP)
                held.reason = f"{NoRoom.code}: its room was asked for"
                self._remember_gone(held.hold)
                self._core.metrics.given_up.inc()
                self._unload(held)
                leaving.append(held)
        unloading = [held.unloaded for held in leaving if held.unloaded is not None]
        if unloading:
            await asyncio.wait(unloading, timeout=UNLOAD_DEADLINE_S)
        return (*freed, *(held.hold.instance_id for held in leaving if held.unloaded is None or held.unloaded.done()))

    def serving(self, instance_id: InstanceId) -> ServingStage:
        """The stage that takes an instance's requests: it is ready, or loads and has room made for it.

        Raises:
            NotLoaded: it is not held whole, or takes none.
        """
        held = self._held.get(instance_id)
        if held is None or not (held.state is HeldState.READY or (held.state is HeldState.LOADING and held.open)):
            state = held.state.value if held else "not held"
            raise NotLoaded(f"{instance_id} is {state} on {self._core.worker_id}", retry_after_s=RETRY_AFTER_S)
        if held.hold.stage != held.hold.model.spec.whole:
            raise NotLoaded(f"{self._core.worker_id} holds only a stage of {instance_id}")
        return ServingStage(hold=held.hold, kv_capacity_tokens=held.kv_capacity_tokens)

    def facts(self, now_s: float) -> tuple[HeldStage, ...]:
        """What is held, as it is reported."""
        return tuple(self._fact(held, now_s) for held in self._held.values())

    def on_opened(self, event: StageOpened) -> None:
        """The engine has made room for a whole model."""
        held = self._held.get(event.instance_id)
        if held is not None and held.state is HeldState.LOADING:
            held.kv_capacity_tokens, held.open = event.kv_capacity_tokens, True
            self._core.changed.set()

    def on_loaded(self, event: StageLoaded) -> None:
        """The engine has every part in place."""
        held = self._held.get(event.instance_id)
        if held is not None and held.loaded is not None and not held.loaded.done():
            held.loaded.set_result(event)

    def on_load_failed(self, event: StageFailed) -> None:
        """The engine cannot load it; its memory is free."""
        held = self._held.get(event.instance_id)
        if held is not None and held.loaded is not None and not held.loaded.done():
            held.loaded.set_exception(error_of(event.code, event.message))

    def on_unloaded(self, instance_id: InstanceId) -> None:
        """The engine has freed it."""
        waiting = self._unloading[instance_id]
        if waiting:
            waiting.popleft().set_result(None)
        if not waiting:
            del self._unloading[instance_id]

    def on_engine_died(self, reason: str, code: str = EngineFailed.code) -> None:
        """The engine and everything in it is gone."""
        self._engine_deaths += 1
        error = error_of(code, f"the engine ended: {reason}")
        for held in list(self._held.values()):
            if held.loaded is not None and not held.loaded.done():
                held.loaded.set_exception(error)
            elif held.state is HeldState.READY:
                self._fail(held, error)
        for waiting in self._unloading.values():
            for unloaded in waiting:
                unloaded.set_result(None)
        self._unloading.clear()
        self._core.changed.set()

    def overdue(self, now_s: float) -> tuple[InstanceId, ...]:
        """Instances that drain, and whose requests have had their time."""
        return tuple(
            instance_id
            for instance_id, held in self._held.items()
            if held.state is HeldState.DRAINING and held.overdue_s <= now_s and self._core.table.in_flight(instance_id) > 0
        )

    def on_requests_ended(self) -> None:
        """Let the drained go."""
        for held in self._held.values():
            self._unload_if_idle(held)

    def stop(self) -> None:
        """Call every load off."""
        for held in self._held.values():
            if held.loading is not None:
                held.loading.cancel()

    def _hold(self, hold: Hold) -> _Held:
        state = step(None, HeldEvent.HOLD)
        assert state is not None
        held = _Held(hold=hold, state=state, since_s=self._core.clock.monotonic_s())
        self._held[hold.instance_id] = held
        return held

    def _start(self, hold: Hold, asked_s: float | None) -> None:
        held = self._hold(hold)
        asked_s = held.since_s if asked_s is None else asked_s
        held.loaded = asyncio.get_running_loop().create_future()
        log.info("stage is loading", action="stage_loading", instance_id=hold.instance_id, model=hold.model.name)
        held.loading = self._core.background.spawn(f"load {hold.instance_id}", self._load(held, asked_s, held.loaded))

    async def _load(self, held: _Held, asked_s: float, loaded: asyncio.Future[StageLoaded]) -> None:
        deaths = self._engine_deaths
        try:
            result = await self._loader.load(held.hold, asked_s, loaded)
            if deaths != self._engine_deaths:
                raise EngineFailed("the engine ended as soon as the stage was loaded")
        except PilotlightError as error:
            self._fail(held, error)
            self._unload(held)
            return
        finally:
            held.loading = held.loaded = None
            if not loaded.cancel():
                loaded.exception()
        held.kv_capacity_tokens = result.kv_capacity_tokens
        held.placed = _placed(result)
        self._move(held, HeldEvent.LOADED)
        self._settled(held.hold.instance_id, None)
        self._core.phases.record(held.hold.instance_id, *result.phases)
        self._core.metrics.loads.labels(outcome="loaded").inc()

    def _fail(self, held: _Held, error: PilotlightError) -> None:
        self._move(held, HeldEvent.FAIL)
        held.reason = f"{error.code}: {error.message}"
        self._settled(held.hold.instance_id, NotLoaded(f"its load failed: {held.reason}"))
        self._core.metrics.loads.labels(outcome=error.code).inc()
        log.warning(
            "stage failed", action="stage_failed", instance_id=held.hold.instance_id, code=error.code, error=error.message
        )

    def _let_go(self, instance_id: InstanceId) -> bool:
        """True when it is gone at once, because it took no memory."""
        held = self._held[instance_id]
        drained = next((hold for hold in self._desired or () if hold.draining and hold.instance_id == instance_id), None)
        if drained is not None:
            self._remember_gone(held.hold)
            within_s = math.inf if drained.drain_within_s is None else drained.drain_within_s
            held.overdue_s = self._core.clock.monotonic_s() + within_s
        if held.state not in RESIDENT:
            self._move(held, HeldEvent.LET_GO)
            return True
        loading = held.loading
        self._move(held, HeldEvent.LET_GO)
        if loading is not None:
            loading.cancel()
            self._settled(instance_id, NotLoaded("its load was called off"))
        self._unload_if_idle(held)
        return False

    def _unload_if_idle(self, held: _Held) -> None:
        busy = self._core.table.in_flight(held.hold.instance_id) > 0
        if held.state is HeldState.DRAINING and held.unloaded is None and not busy:
            self._unload(held)

    def _unload(self, held: _Held) -> None:
        unloaded = asyncio.get_running_loop().create_future()
        held.unloaded = unloaded
        self._unloading[held.hold.instance_id].append(unloaded)
        self._core.background.spawn(f"unload {held.hold.instance_id}", self._ask_unload(held, unloaded))

    async def _ask_unload(self, held: _Held, unloaded: asyncio.Future[None]) -> None:
        """Have the engine free a stage; an engine that is dead, or is killed because it does not answer, has freed it too."""
        try:
            await self._core.engine.unload_stage(UnloadStage(instance_id=held.hold.instance_id))
            await within(LOST_UNLOAD_S, asyncio.shield(unloaded), "unloading a stage")
        except EngineFailed:
            # Its death may have been told before this was asked: then nobody else answers it.
            waiting = self._unloading[held.hold.instance_id]
            if unloaded in waiting:
                waiting.remove(unloaded)
                unloaded.set_result(None)
        except DeadlineExceeded as error:
            await self._core.engine.kill(error.message)
            await within(UNLOAD_DEADLINE_S, unloaded, "killing an engine that does not unload")
        if held.state is HeldState.DRAINING:
            self._move(held, HeldEvent.UNLOADED)
            self.reconcile()

    def _move(self, held: _Held, event: HeldEvent) -> None:
        state = step(held.state, event)
        held.since_s = self._core.clock.monotonic_s()
        if state is None:
            instance_id = held.hold.instance_id
            del self._held[instance_id]
            self._core.table.instance_gone(instance_id)
        else:
            held.state = state
        self._core.changed.set()

    def _remember_gone(self, hold: Hold) -> None:
        self._gone[hold.instance_id] = hold.generation
        while len(self._gone) > GONE_KEPT:
            self._gone.popitem(last=False)

    def _fact(self, held: _Held, now_s: float) -> HeldStage:
        hold = held.hold
        in_flight = self._core.table.in_flight(hold.instance_id)
        used_s = max(held.since_s, self._core.table.ended_s(hold.instance_id) or 0.0)
        idle = held.state is HeldState.READY and in_flight == 0
        return HeldStage(
            instance_id=hold.instance_id,
            generation=hold.generation,
            model=hold.model.name,
            digest=hold.model.digest,
            stage=hold.stage,
            state=held.state,
            device_bytes=hold.device_bytes if held.state in RESIDENT else 0,
            in_flight=in_flight,
            idle_s=now_s - used_s if idle else 0.0,
            reason=held.reason,
            kv_capacity_tokens=held.kv_capacity_tokens,
            loaded=held.placed,
            open=held.open and held.state is HeldState.LOADING,
        )


def _placed(loaded: StageLoaded) -> Moment | None:
    """The end of the engine's last work on it."""
    last = max(loaded.phases, key=lambda phase: phase.end_s, default=None)
    return Moment(at_s=last.end_s, wall_offset_s=last.wall_offset_s) if last is not None else None
