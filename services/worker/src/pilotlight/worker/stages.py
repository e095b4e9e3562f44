"""The stages that a worker holds: brings what is held to what is desired, and is the only one to
write it.
"""

import asyncio
import math
from collections.abc import Callable, Sequence

import structlog

from pilotlight.common.errors import (
    EngineFailed,
    NoRoom,
    NotLoaded,
    PilotlightError,
    StaleCommand,
    error_of,
)
from pilotlight.common.messages.engine import StageFailed, StageLoaded, StageOpened, StageRefused
from pilotlight.common.messages.hold import Hold, WorkerHold
from pilotlight.common.messages.pipelines import PipelineLeft, StageConnected, StageGrown
from pilotlight.common.newest import Newest
from pilotlight.policy.cluster import HeldState
from pilotlight.policy.ids import Epoch, InstanceId
from pilotlight.policy.lending import LendingRules
from pilotlight.worker.core import WorkerCore
from pilotlight.worker.held import Held, placed_at
from pilotlight.worker.held_table import HeldTable
from pilotlight.worker.lending import Lending
from pilotlight.worker.lifecycle import RESIDENT, HeldEvent, drain_of, plan
from pilotlight.worker.loading import StageLoader
from pilotlight.worker.renaming import Renames
from pilotlight.worker.unloads import Unloads

log = structlog.get_logger()

UNLOAD_DEADLINE_S = 10.0
"""How long a command that asks for room waits for it: an engine frees memory between two steps, of
which one may take long."""


class Stages:
    """Owns the table of held stages of one worker.

    ``settled`` is called with a stage that takes requests while it loads, once its load has ended:
    with an error if it is not ready then, and its requests have to go on elsewhere.
    """

    def __init__(
        self,
        core: WorkerCore,
        loader: StageLoader,
        settled: Callable[[InstanceId, PilotlightError | None], None],
        *,
        quiet: bool = True,
        rules: LendingRules | None = None,
    ) -> None:
        """Holds nothing yet.

        Args:
            core: the worker's.
            loader: carries loads out.
            settled: see the class.
            quiet: see ``Lending``.
            rules: of loans; None: the defaults.
        """
        self._core = core
        self._loader = loader
        self._settled = settled
        self.held = HeldTable(core)
        """To be read by others, and changed here alone."""
        self.lending = Lending(core, self.held, quiet=quiet, rules=rules or LendingRules())
        self._unloads = Unloads(core)
        self.renames = Renames(core, self.held, self._unloads, self._fail_and_unload)
        self._desired: tuple[Hold, ...] | None = None
        """None until the first command: absence is never deletion."""
        self._epoch = Epoch(0)
        self._newest = Newest()

    @property
    def epoch(self) -> Epoch:
        """The highest epoch that a command carried."""
        return self._epoch

    def command(self, command: WorkerHold, asked_s: float) -> None:
        """Take the complete desired set, which was asked for at ``asked_s``.

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
        self.reconcile(asked_s)
        self.on_requests_ended()

    def reconcile(self, asked_s: float | None = None) -> None:
        """Do what is missing between held and desired; nothing, when nothing is.

        ``asked_s`` is when that was asked for: now, unless it is a command that does.
        """
        if self._desired is None:
            return
        views = {held.hold.instance_id: held.view for held in self.held}
        todo = plan(views, self.held.gone, self._desired, self._core.device_bytes)
        for hold in todo.renew:
            self.held[hold.instance_id].renew(hold)
        removed = [self._let_go(instance_id) for instance_id in todo.let_go]
        if self._core.engine.alive:
            for hold in todo.start:
                self._start(hold, asked_s)
            for hold in todo.grow:
                self._grow(self.held[hold.instance_id], hold)
            self.renames.begin(todo.rename)
        for hold in todo.refuse:
            held = self.held.add(hold)
            self._fail(
                held,
                NoRoom(f"{hold.device_bytes} bytes were granted, and the device has no such room"),
            )
        if todo.renew or todo.let_go or todo.start or todo.grow or todo.refuse:
            self._core.changed.set()
        if any(removed):
            # A newer generation may have waited for the place.
            self.reconcile(asked_s)

    async def give_up(self, instance_ids: Sequence[InstanceId]) -> tuple[InstanceId, ...]:
        """Unload these if they are ready and idle; returns the ones whose memory is free, also of
        an earlier call.
        """
        freed: list[InstanceId] = []
        leaving: list[Held] = []
        for instance_id in instance_ids:
            held = self.held.get(instance_id)
            if held is None and instance_id in self.held.gone:
                freed.append(instance_id)
            elif held is not None and held.state is HeldState.EVICTED:
                leaving.append(held)
            elif held is not None and held.idle and self._core.table.in_flight(instance_id) == 0:
                # From here on submits are refused: no request can slip in between.
                self.held.move(held, HeldEvent.GIVE_UP)
                held.reason = f"{NoRoom.code}: its room was asked for"
                self.held.remember_gone(held.hold)
                self._core.metrics.given_up.inc()
                self._unload(held)
                leaving.append(held)
        unloading = [held.unloaded for held in leaving if held.unloaded is not None]
        if unloading:
            await asyncio.wait(unloading, timeout=UNLOAD_DEADLINE_S)
        done = (one for one in leaving if one.unloaded is None or one.unloaded.done())
        return (*freed, *(held.hold.instance_id for held in done))

    def on_opened(self, event: StageOpened) -> None:
        """The engine takes requests for a stage."""
        held = self.held.get(event.instance_id)
        if held is not None and held.state in (HeldState.LOADING, HeldState.READY):
            held.has_kv(event.kv_capacity_tokens)
            held.open = True
            self._core.changed.set()
            self.lending.wake()

    def on_loaded(self, event: StageLoaded) -> None:
        """The engine has every part in place."""
        held = self.held.get(event.instance_id)
        if held is not None and held.loaded is not None and not held.loaded.done():
            held.loaded.set_result(event)

    def on_load_failed(self, event: StageFailed) -> None:
        """The engine cannot load it; its memory is free."""
        held = self.held.get(event.instance_id)
        error = error_of(event.code, event.message)
        if held is not None and held.loaded is not None and not held.loaded.done():
            held.loaded.set_exception(error)
        elif held is not None and held.state is HeldState.READY:
            held.hear_grown(error)
            self._fail(held, error)
        elif held is not None and held.state is HeldState.DRAINING:
            held.joined = False  # The engine holds it no more, and says nothing else of that.
            self._settled(event.instance_id, NotLoaded(f"its growth failed: {event.message}"))
            self._unload_if_idle(held)

    def on_growth(self, event: StageGrown | StageRefused) -> None:
        """The engine runs a longer range; or it cannot do what was asked for a stage, which stays
        what it was.
        """
        if event.instance_id is not None and (held := self.held.get(event.instance_id)) is not None:
            held.hear_grown(
                event if isinstance(event, StageGrown) else error_of(event.code, event.message)
            )

    def on_joined(self, event: StageConnected) -> None:
        """A stage is one of a pipeline."""
        if (held := self.held.get(event.instance_id)) is not None:
            held.join()

    def on_pipeline_left(self, event: PipelineLeft) -> None:
        """A stage is in no pipeline any more, and serves nothing until it is joined again; one that
        is to have the whole model goes on alone.
        """
        held = self.held.get(event.instance_id)
        if held is None:
            return
        held.joined = False
        if held.growing is None or held.growing.stage != held.growing.model.spec.whole:
            held.open = False
            self._core.changed.set()
        self._unload_if_idle(held)
        self.reconcile()

    def on_unloaded(self, instance_id: InstanceId) -> None:
        """The engine has freed it."""
        self._unloads.on_unloaded(instance_id)

    def on_engine_died(
        self,
        reason: str,
        code: str = EngineFailed.code,
        instances: frozenset[InstanceId] | None = None,
    ) -> None:
        """The engine and everything in it is gone: these instances, or all."""
        error = error_of(code, f"the engine ended: {reason}")
        for held in self.held:
            instance_id = held.hold.instance_id
            if instances is not None and instance_id not in instances:
                continue
            held.lost, held.joined = True, False
            if held.loaded is not None and not held.loaded.done():
                held.loaded.set_exception(error)
            elif held.state is HeldState.READY:
                held.hear_grown(error)
                self._fail(held, error)
        self._unloads.on_engine_died(instances)
        self.lending.on_engine_died(instances)
        self._core.changed.set()

    def on_requests_ended(self) -> None:
        """Let the drained go."""
        for held in self.held:
            self._unload_if_idle(held)

    def stop(self) -> None:
        """Call every load off."""
        for held in self.held:
            if held.loading is not None:
                held.loading.cancel()

    def _grow(self, held: Held, hold: Hold) -> None:
        held.growing, held.grown = hold, asyncio.get_running_loop().create_future()
        log.info(
            "stage is growing",
            action="stage_growing",
            instance_id=hold.instance_id,
            stop=hold.stage.stop,
        )
        held.loading = self._core.background.spawn(
            f"grow {hold.instance_id}", self._extend(held, hold, held.grown)
        )

    async def _extend(self, held: Held, hold: Hold, grown: asyncio.Future[StageGrown]) -> None:
        """What goes wrong before the engine runs the longer range leaves the stage as it was; the
        next command asks again.
        """
        try:
            result = await self._loader.grow(hold, held.hold.stage, grown, self.lending.made_room)
        except PilotlightError as error:
            await self._not_grown(held, error, broken=held.unproven)
            return
        finally:
            held.loading = held.growing = held.grown = None
            if not grown.cancel():
                grown.exception()
            self._core.changed.set()
        if held.state is HeldState.READY:
            held.hold, held.reason = hold, ""
            held.has_kv(result.kv_capacity_tokens)
            self.held.move(held, HeldEvent.GROW)
            self._settled(hold.instance_id, None)
            self._core.phases.add(hold.instance_id, *result.phases)

    async def _not_grown(self, held: Held, error: PilotlightError, *, broken: bool) -> None:
        """A growth failed.

        The stage is ``broken`` when the engine runs parts that may not have been whole.
        """
        log.warning(
            "stage does not grow",
            action="stage_not_grown",
            instance_id=held.hold.instance_id,
            error=error.message,
        )
        if held.state is HeldState.READY and broken:
            self._fail_and_unload(held, error)
        elif held.state is HeldState.READY:
            held.reason = f"{error.code}: {error.message}"
            await self._loader.call_off(held.hold.instance_id, error)

    def _start(self, hold: Hold, asked_s: float | None) -> None:
        held = self.held.add(hold)
        asked_s = held.since_s if asked_s is None else asked_s
        held.loaded = asyncio.get_running_loop().create_future()
        log.info(
            "stage is loading",
            action="stage_loading",
            instance_id=hold.instance_id,
            model=hold.model.name,
        )
        held.loading = self._core.background.spawn(
            f"load {hold.instance_id}", self._load(held, asked_s, held.loaded)
        )

    async def _load(self, held: Held, asked_s: float, loaded: asyncio.Future[StageLoaded]) -> None:
        try:
            result = await self._loader.load(held.hold, asked_s, loaded, self.lending.made_room)
            if held.lost:
                raise EngineFailed("the engine ended as soon as the stage was loaded")
        except PilotlightError as error:
            self._fail_and_unload(held, error)
            return
        finally:
            held.loading = held.loaded = None
            if not loaded.cancel():
                loaded.exception()
        held.has_kv(result.kv_capacity_tokens)
        held.placed = placed_at(result)
        self.held.move(held, HeldEvent.LOADED)
        self._settled(held.hold.instance_id, None)
        self._core.phases.add(held.hold.instance_id, *result.phases)
        self._core.metrics.loads.labels(outcome="loaded").inc()

    def _fail_and_unload(self, held: Held, error: PilotlightError) -> None:
        self._fail(held, error)
        self._unload(held)

    def _fail(self, held: Held, error: PilotlightError) -> None:
        self.held.move(held, HeldEvent.FAIL)
        held.reason = f"{error.code}: {error.message}"
        self._settled(held.hold.instance_id, NotLoaded(f"its load failed: {held.reason}"))
        self._core.metrics.loads.labels(outcome=error.code).inc()
        log.warning(
            "stage failed",
            action="stage_failed",
            instance_id=held.hold.instance_id,
            code=error.code,
            error=error.message,
        )

    def _let_go(self, instance_id: InstanceId) -> bool:
        """True when it is gone at once, because it took no memory."""
        held = self.held[instance_id]
        drained = drain_of(self._desired or (), instance_id)
        if drained is not None:
            self.held.remember_gone(held.hold)
            within_s = math.inf if drained.drain_within_s is None else drained.drain_within_s
            held.overdue_s = self._core.clock.monotonic_s() + within_s
        if held.state not in RESIDENT:
            self.held.move(held, HeldEvent.LET_GO)
            return True
        loading, unsure = held.loading, held.growing is None or held.unproven
        # What lacks parts is of no use to its pipeline: that ends with it.
        held.joined = held.joined and held.state is not HeldState.LOADING
        self.held.move(held, HeldEvent.LET_GO)
        if loading is not None:
            loading.cancel()
            error = NotLoaded("its load was called off")
            if unsure:
                self._settled(instance_id, error)
            else:
                # Else its engine would wait for parts when the others of its pipeline leave.
                self._core.background.spawn(
                    f"call off {instance_id}", self._loader.call_off(instance_id, error)
                )
        self._unload_if_idle(held)
        return False

    def _unload_if_idle(self, held: Held) -> None:
        """One that drains stays for the requests of the stage that leads, while that one has it."""
        instance_id = held.hold.instance_id
        if held.state is not HeldState.DRAINING or held.unloaded is not None:
            return
        wanted = held.follows and drain_of(self._desired or (), instance_id) is not None
        if not wanted and self._core.table.in_flight(instance_id) == 0:
            self._unload(held)

    def _unload(self, held: Held) -> None:
        instance_id = held.hold.instance_id
        held.unloaded = self._unloads.begin(instance_id)
        self._core.background.spawn(
            f"unload {instance_id}", self._finish_unload(held, held.unloaded)
        )

    async def _finish_unload(self, held: Held, unloaded: asyncio.Future[None]) -> None:
        await self._unloads.ask(held.hold.instance_id, unloaded)
        if held.state is HeldState.DRAINING:
            self.held.move(held, HeldEvent.UNLOADED)
            self.reconcile()
