"""KV beyond grants: what the cache lends this worker's stages, and what the engine has given them.

One task changes it, a stage at a time: it compares what is lent with what may be lent after every
change (``policy.lending.next_resize``), has the engine resize a stage, and looks again. A stage
that is about to be loaded counts with its grant from the moment of its hold, so loans shrink for
it, and its load waits for that alone (``made_room``).
"""

import asyncio
from collections.abc import Collection

import structlog

from pilotlight.common.errors import (
    DeadlineExceeded,
    EngineFailed,
    NoRoom,
    NotLoaded,
    PilotlightError,
    error_of,
)
from pilotlight.common.messages.engine import ResizeStage, StageRefused, StageResized
from pilotlight.common.messages.room import Lend
from pilotlight.common.waiting import pause, within, woken
from pilotlight.policy.cluster import HeldState, KvLoan
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.lending import (
    LendingRules,
    LentStage,
    Resize,
    next_resize,
)
from pilotlight.worker.build_room import BuildRoom
from pilotlight.worker.core import WorkerCore
from pilotlight.worker.held import Held
from pilotlight.worker.held_table import HeldTable
from pilotlight.worker.lifecycle import RESIDENT

log = structlog.get_logger()

RESIZE_DEADLINE_S = 30.0
"""An engine resizes between two steps. One that hangs its own watch finds earlier."""
ROOM_DEADLINE_S = 5.0
"""How long a load waits for what was lent."""
REACH_DEADLINE_S = 0.3
"""How long a submit waits for KV that it alone needs: its answer is due within 0.5 s."""
QUIET_PAUSE_S = 0.02
"""Between two steps of growth that nothing waits for: streams are to notice none of it."""
REFUSED_PAUSE_S = 5.0
"""A stage whose engine refuses to grow is left as it is for so long."""
SPARE_TOKENS = 64
"""Room for outputs beside each request's prompt: below it, requests want more."""
RETRY_AFTER_S = 0.5


class Lending:
    """Owns the loans of one worker's stages (``Held.loan``)."""

    def __init__(
        self, core: WorkerCore, held: HeldTable, *, quiet: bool = True, rules: LendingRules
    ) -> None:
        """Lends nothing before it is told.

        Args:
            core: the worker's.
            held: its stages; this changes their loans and their KV's capacity alone.
            quiet: stages take what they are offered though nothing waits for it: their device's
                memory is used by nothing else. On cores they take what requests want.
            rules: figures.
        """
        self._core = core
        self._held = held
        self._quiet = quiet
        self._rules = rules
        self.build = BuildRoom(core)
        """What a build has beside grants and loans."""
        self._turned = asyncio.Event()
        """Set, and replaced, when the task has looked."""
        self._under_way: tuple[InstanceId, asyncio.Future[StageResized]] | None = None

    def start(self) -> None:
        """Follow what is offered and wanted from now on."""
        self._core.background.spawn(f"loans of {self._core.worker_id}", self._follow())

    def lend(self, message: Lend) -> None:
        """Take what the cache lends."""
        loans = {loan.instance_id: loan.num_bytes for loan in message.loans}
        for held in self._held:
            held.loan.offered_bytes = loans.get(held.hold.instance_id, 0)
        self.build.offer(message.build_bytes)
        self.wake()
        self._core.changed.set()

    def wake(self) -> None:
        """Something that matters here has changed."""
        self._core.room_changed.set()

    def press(self) -> None:
        """Requests wait for KV in the engine: stages that have requests want more than they
        have.
        """
        for held in self._held:
            in_flight = self._core.table.in_flight(held.hold.instance_id)
            if in_flight and held.state is HeldState.READY:
                held.loan.pressed_tokens = held.kv_capacity_tokens + 1
        self.wake()

    def on_prefilled(self, instance_id: InstanceId) -> None:
        """A stage has given its first token: its start is over."""
        if (held := self._held.get(instance_id)) is not None:
            held.loan.begun = True
            self.wake()

    def on_resized(self, event: StageResized) -> None:
        """The engine has done it."""
        if self._under_way is not None and self._under_way[0] == event.instance_id:
            self._settle(event)

    def on_refused(self, event: StageRefused) -> None:
        """The engine refuses something: this, if that is what was asked last."""
        if self._under_way is not None and self._under_way[0] == event.instance_id:
            self._settle(error_of(event.code, event.message))

    def on_engine_died(self, instances: Collection[InstanceId] | None) -> None:
        """An engine is gone, with these instances or with all, and with what they were lent."""
        for held in self._held:
            if instances is None or held.hold.instance_id in instances:
                held.loan.lent_bytes = held.loan.unready_bytes = 0
        if self._under_way is not None and (instances is None or self._under_way[0] in instances):
            self._settle(EngineFailed("the engine ended"))
        self.wake()

    async def made_room(self) -> None:
        """Return when nothing is lent that grants need.

        Raises:
            NoRoom: the engine does not give it back.
        """
        self.wake()
        try:
            await within(ROOM_DEADLINE_S, self._until_room(), "taking back what was lent")
        except DeadlineExceeded as error:
            raise NoRoom(
                f"KV that was lent on {self._core.worker_id} does not come back: {error.message}"
            ) from error

    async def reach(self, held: Held, tokens: int) -> None:
        """Return when a stage has KV for a request that can reach so many tokens, if it can have.

        Raises:
            NotLoaded: that takes longer than a submit may.
        """
        if not held.kv_capacity_tokens < tokens <= self.limit_tokens(held):
            return
        self._core.make_way()  # A build's room may be what is missing.
        held.loan.reaching.append(tokens)
        self.wake()
        try:
            await within(REACH_DEADLINE_S, self._until_reached(held, tokens), "growing KV")
        except DeadlineExceeded as error:
            raise NotLoaded(
                f"KV of {held.hold.instance_id} is growing", retry_after_s=RETRY_AFTER_S
            ) from error
        finally:
            held.loan.reaching.remove(tokens)
        held.loan.reached_tokens = max(held.loan.reached_tokens, tokens)

    def limit_tokens(self, held: Held) -> int:
        """Tokens for which a stage has room when it has grown into its loan; 0: it has no KV
        yet.
        """
        if not held.kv_capacity_tokens:
            return 0
        loan = held.loan
        more = max(0, min(self._offered_bytes(held) - loan.lent_bytes, self._free_bytes))
        return held.kv_capacity_tokens + (more + loan.unready_bytes) // _token_bytes(held)

    def alone_tokens(self, held: Held) -> int:
        """Tokens for which it would have room if it had the device to itself."""
        parameters = held.hold.model.device_bytes(held.hold.stage)
        return max(0, self._core.device_bytes - parameters) // _token_bytes(held)

    def fact(self, instance_id: InstanceId) -> KvLoan:
        """A stage's loan, as it is reported."""
        held = self._held.get(instance_id)
        if held is None or held.state not in RESIDENT:
            return KvLoan()
        return KvLoan(
            lent_bytes=held.loan.lent_bytes,
            offered_bytes=held.loan.offered_bytes,
            wanted_bytes=self._wanted_bytes(held),
            most_bytes=self._most_bytes(held),
            limit_tokens=self.limit_tokens(held),
        )

    @property
    def more_tokens(self) -> int:
        """KV that all stages that are ready could still have."""
        return sum(
            self.limit_tokens(held) - held.kv_capacity_tokens
            for held in self._held
            if held.state is HeldState.READY
        )

    @property
    def buildable_bytes(self) -> int:
        """What a build could have if all that is lent were called back, beside what its engine
        keeps for itself.
        """
        return max(0, self._unlent_bytes - self.build.beside_bytes)

    @property
    def _unlent_bytes(self) -> int:
        """Not granted."""
        resident = (held for held in self._held if held.state in RESIDENT)
        return self._core.device_bytes - sum(held.view.device_bytes for held in resident)

    @property
    def _free_bytes(self) -> int:
        """Neither granted nor lent; below 0: lent, and granted to others meanwhile."""
        lent = sum(held.loan.lent_bytes for held in self._held if held.state in RESIDENT)
        return self._unlent_bytes - lent

    def _offered_bytes(self, held: Held) -> int:
        """What it may have: while its engine refuses to grow, no more than it has."""
        loan = held.loan
        refused = self._core.clock.monotonic_s() < loan.refused_until_s
        return min(loan.offered_bytes, loan.lent_bytes) if refused else loan.offered_bytes

    def _wanted_bytes(self, held: Held) -> int:
        """KV beyond the grant for the requests in flight: what they came with and room for some
        output, what a single one can reach, and more than there is while some wait in the engine.
        """
        loan, instance_id = held.loan, held.hold.instance_id
        in_flight = self._core.table.in_flight(instance_id)
        if not in_flight:
            loan.reached_tokens = loan.pressed_tokens = 0
        tokens = max(
            self._core.table.held_tokens(instance_id) + in_flight * SPARE_TOKENS,
            loan.reached_tokens,
            loan.pressed_tokens,
            *loan.reaching,
        )
        return max(0, tokens - loan.granted_tokens) * _token_bytes(held)

    def _most_bytes(self, held: Held) -> int:
        """As much KV beyond the grant as a stage can use: it runs so many requests at most, each
        within its context. One that leaves keeps what it has.
        """
        spec, loan = held.hold.model.spec, held.loan
        if held.hold.stage != spec.whole or held.hold.members:
            return 0
        if held.state is HeldState.DRAINING:
            return loan.lent_bytes
        tokens = self._core.table.max_running * spec.max_context_tokens - loan.granted_tokens
        return max(0, tokens) * _token_bytes(held)

    def _stages(self) -> tuple[LentStage, ...]:
        # A load has the device's driver to itself.
        quiet = self._quiet and all(held.state is not HeldState.LOADING for held in self._held)
        return tuple(
            LentStage(
                instance_id=held.hold.instance_id,
                granted_bytes=held.view.device_bytes,
                lent_bytes=held.loan.lent_bytes,
                offered_bytes=self._offered_bytes(held),
                wanted_bytes=self._wanted_bytes(held),
                quiet=quiet and self._is_settled(held),
                starts=held.state is HeldState.LOADING,
                unready_bytes=held.loan.unready_bytes,
            )
            for held in self._held
            if held.state in RESIDENT and held.unloaded is None and held.kv_capacity_tokens
        )

    def _is_settled(self, held: Held) -> bool:
        """Its start is over: its first token has left, or nothing asks for one."""
        busy = self._core.table.in_flight(held.hold.instance_id) > 0
        return held.state is HeldState.READY and (held.loan.begun or not busy)

    def _next(self) -> Resize | None:
        stages, free_bytes = self._stages(), self._free_bytes
        # A build counts like a grant.
        free_bytes -= self.build.counted_bytes(free_bytes, self._unlent_bytes)
        granted_bytes = self._core.device_bytes - free_bytes - sum(one.lent_bytes for one in stages)
        return next_resize(self._core.device_bytes, granted_bytes, stages, self._rules)

    async def _follow(self) -> None:
        while True:
            self._core.room_changed.clear()
            resize = self._next() if self._core.engine.alive else None
            if resize is not None:
                await self._resize(resize)
            self.build.look(self._free_bytes)
            turned, self._turned = self._turned, asyncio.Event()
            turned.set()
            self._count()
            if resize is None:
                await woken(self._core.room_changed, REFUSED_PAUSE_S)
            elif resize.grows and not resize.urgent:
                await woken(self._core.room_changed, QUIET_PAUSE_S)

    def _count(self) -> None:
        resident = [held for held in self._held if held.state in RESIDENT]
        self._core.metrics.lending.lent(
            sum(held.view.device_bytes for held in resident),
            sum(held.loan.lent_bytes for held in resident),
        )

    async def _resize(self, resize: Resize) -> None:
        """Have the engine resize one stage, and book what came of it."""
        core, held = self._core, self._held[resize.instance_id]
        before, start_s = held.loan.lent_bytes, core.clock.monotonic_s()
        # In the books first when it grows, and last when it shrinks: what is free is free for sure.
        held.loan.lent_bytes = max(before, resize.lent_bytes)
        done: asyncio.Future[StageResized] = asyncio.get_running_loop().create_future()
        self._under_way = (resize.instance_id, done)
        command = ResizeStage(
            instance_id=resize.instance_id,
            device_bytes=held.hold.device_bytes + resize.lent_bytes,
            must=not resize.grows,
            target_bytes=held.hold.device_bytes + resize.target_bytes if resize.target_bytes else 0,
        )
        try:
            await core.engine.resize_stage(command)
            result = await within(RESIZE_DEADLINE_S, asyncio.shield(done), "resizing KV")
        except PilotlightError as error:
            await self._not_resized(held, resize, before, error)
            return
        finally:
            self._under_way = None
            if not done.cancel():
                done.exception()
        room_bytes = (result.device_bytes or command.device_bytes) - held.hold.device_bytes
        # Memory that gives no room is there all the same while it grows, and gone when it shrank.
        held.loan.lent_bytes = resize.lent_bytes if resize.grows else max(0, room_bytes)
        held.loan.unready_bytes = max(0, held.loan.lent_bytes - room_bytes)
        held.loan.pressed_tokens = 0
        held.kv_capacity_tokens = result.kv_capacity_tokens
        core.metrics.lending.resized(grew=resize.grows, seconds=core.clock.monotonic_s() - start_s)
        core.changed.set()

    async def _not_resized(
        self, held: Held, resize: Resize, before: int, error: PilotlightError
    ) -> None:
        """The stage is what it was; it is asked again later."""
        held.loan.lent_bytes = min(held.loan.lent_bytes, before)
        held.loan.refused_until_s = self._core.clock.monotonic_s() + REFUSED_PAUSE_S
        self._core.metrics.lending.refused.inc()
        log.warning(
            "KV is not resized",
            action="kv_not_resized",
            instance_id=resize.instance_id,
            grows=resize.grows,
            error=error.message,
        )
        if not resize.grows:
            await pause(QUIET_PAUSE_S)

    def _settle(self, outcome: StageResized | PilotlightError) -> None:
        assert self._under_way is not None, "something was asked"
        _, done = self._under_way
        if done.done():
            return
        if isinstance(outcome, PilotlightError):
            done.set_exception(outcome)
        else:
            done.set_result(outcome)

    async def _until_room(self) -> None:
        while self._free_bytes < self.build.taken_bytes:
            await self._turned.wait()

    async def _until_reached(self, held: Held, tokens: int) -> None:
        while held.kv_capacity_tokens < tokens:
            await self._turned.wait()


def _token_bytes(held: Held) -> int:
    """KV of one token."""
    model = held.hold.model
    return max(1, model.spec.kv_bytes_per_token(held.hold.stage, model.dtype))
