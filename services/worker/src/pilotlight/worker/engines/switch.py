"""The engines of one worker: for each stage the one that its model asks for.

::

    load_stage(model.engine)               ─> the engine of that kind, made and started for its first stage
    place_part, unload_stage, run          ─> the engine that has the instance
    events                                <─  every engine's; a step says what all of them together have

The main engine is made at once and started with the worker: what it finds out about the device
holds for all. Another engine that dies is started again for the next stage of its kind.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import msgspec

from pilotlight.common.envelope import Timed
from pilotlight.common.errors import EngineFailed, UnsupportedModel
from pilotlight.common.messages.engine import (
    Abort,
    EngineUp,
    LeaveRoom,
    LoadStage,
    PlacePart,
    Prefilled,
    ResizeStage,
    Run,
    StageFailed,
    StageLoaded,
    StageOpened,
    StageRefused,
    StageResized,
    StageUnloaded,
    StepDone,
    UnloadStage,
)
from pilotlight.common.messages.pipelines import (
    CallOffExtend,
    ConnectStage,
    ExtendStage,
    OpenDoor,
    PipelineLeft,
    RenameStage,
    RingUnformed,
    StageGrown,
    StageRenamed,
    VouchStage,
)
from pilotlight.common.service import Background
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.model import EngineKind
from pilotlight.policy.phase import Moment
from pilotlight.worker.engines.client import EngineClient, EngineDied, EngineEvent

OnEvent = Callable[[Timed[EngineEvent]], Awaitable[None]]
OnSteps = Callable[[Sequence[Timed[StepDone]]], Awaitable[None]]
"""Steps of one engine that are heard together, one after the other."""
SUMMED = ("waiting", "running", "kv_free_tokens", "kv_used_tokens", "kv_cached_tokens")
"""Fields of a step that say what an engine has, not what the step did."""


@dataclass(slots=True)
class _Route:
    kind: EngineKind
    loaded: bool = True
    """A load was asked for, and no unload after it."""
    unloads: Counter[EngineKind] = field(default_factory=Counter["EngineKind"])
    """Asked of each engine, and not confirmed: an instance may have come back on another one."""


class EngineSwitch:
    """One ``EngineClient`` for each kind of engine that the worker's models ask for.

    Its commands are those of ``EngineClient``.
    """

    def __init__(
        self,
        factories: Mapping[EngineKind, Callable[[], EngineClient]],
        background: Background,
        main: EngineKind = EngineKind.NATIVE,
        renew: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Makes the main engine.

        Args:
            factories: make an engine, by its kind; models of other kinds are refused.
            background: owns what reads the engines' events.
            main: the kind of the main engine.
            renew: puts a new process in the place of the main engine's; None: starts find the one
                that is there.
        """
        self._factories = factories
        self._background = background
        self._main = main
        self._renew = renew
        self._engines: dict[EngineKind, EngineClient] = {main: factories[main]()}
        self._routes: dict[InstanceId, _Route] = {}
        self._steps: dict[EngineKind, StepDone] = {}
        """The last one of each engine."""
        self._heard: tuple[OnEvent, OnSteps] | None = None

    @property
    def main(self) -> EngineClient:
        """The engine that starts with the worker."""
        return self._engines[self._main]

    @property
    def alive(self) -> bool:
        """The main engine is; another one is started when it is needed."""
        return self.main.alive

    async def start(self) -> EngineUp:
        """Start the main engine; see ``EngineClient.start``."""
        return await self.main.start()

    @property
    def renews(self) -> bool:
        """``renew`` would begin a new process."""
        return self._renew is not None and not self._routes

    async def renew(self) -> bool:
        """Begin a start with a new process, where starts are to, and nothing is on the old one.

        Raises:
            EngineFailed: it does not start.
        """
        if self._renew is None or not self.renews:
            return False
        await self._renew()
        return True

    def follow(self, on_event: OnEvent, on_steps: OnSteps) -> None:
        """From now on have every engine's events handled, each engine's in order."""
        self._heard = on_event, on_steps
        for kind, engine in self._engines.items():
            self._read(kind, engine, on_event, on_steps)

    async def load_stage(self, command: LoadStage, sent: Moment | None = None) -> None:
        """See ``EngineClient.load_stage``.

        Raises:
            UnsupportedModel: there is no engine of the kind that the model asks for.
            EngineFailed: it does not start, or does not run.
        """
        kind = command.model.engine
        engine = self._engine(kind)
        route = self._routes.setdefault(command.instance_id, _Route(kind))
        route.kind, route.loaded = kind, True
        if kind is not self._main:
            await engine.start()
        await engine.load_stage(command, sent)

    async def place_part(self, command: PlacePart, ready: Moment | None = None) -> None:
        """See ``EngineClient.place_part``."""
        await self._having(command.instance_id).place_part(command, ready)

    async def unload_stage(self, command: UnloadStage) -> None:
        """See ``EngineClient.unload_stage``."""
        # Also of one that no engine has: should the main engine die before it has answered, that is
        # the answer.
        route = self._routes.setdefault(command.instance_id, _Route(self._main))
        route.loaded = False
        kind = route.kind
        route.unloads[kind] += 1
        try:
            await self._engines[kind].unload_stage(command)
        except EngineFailed:
            self._unloaded(kind, command.instance_id)
            raise

    async def open_door(self, command: OpenDoor) -> None:
        """See ``EngineClient.open_door``."""
        await self.main.open_door(command)

    async def connect_stage(self, command: ConnectStage) -> None:
        """See ``EngineClient.connect_stage``."""
        await self._having(command.instance_id).connect_stage(command)

    async def extend_stage(self, command: ExtendStage) -> None:
        """See ``EngineClient.extend_stage``."""
        await self._having(command.instance_id).extend_stage(command)

    async def vouch_stage(self, command: VouchStage) -> None:
        """See ``EngineClient.vouch_stage``."""
        await self._having(command.instance_id).vouch_stage(command)

    async def call_off_extend(self, command: CallOffExtend) -> None:
        """See ``EngineClient.call_off_extend``."""
        await self._having(command.instance_id).call_off_extend(command)

    async def rename_stage(self, command: RenameStage) -> None:
        """See ``EngineClient.rename_stage``."""
        engine, route = self._having(command.instance_id), self._routes.get(command.instance_id)
        if route is not None:
            # Both names lead to it until it has answered.
            self._routes[command.new_id] = _Route(route.kind, loaded=True)
        await engine.rename_stage(command)

    async def resize_stage(self, command: ResizeStage) -> None:
        """See ``EngineClient.resize_stage``."""
        await self._having(command.instance_id).resize_stage(command)

    async def leave_room(self, command: LeaveRoom) -> None:
        """See ``EngineClient.leave_room``: the main engine has the device's memory."""
        await self.main.leave_room(command)

    async def run(self, command: Run) -> None:
        """See ``EngineClient.run``."""
        await self._having(command.instance_id).run(command)

    def run_soon(self, command: Run) -> bool:
        """See ``EngineClient.run_soon``."""
        return self._having(command.instance_id).run_soon(command)

    async def abort(self, command: Abort) -> None:
        """See ``EngineClient.abort``.

        Which engine has the request is not known here, so every one that runs is told.
        """
        failed: EngineFailed | None = None
        for kind, engine in self._engines.items():
            if kind is self._main or engine.alive:
                try:
                    await engine.abort(command)
                except EngineFailed as error:
                    failed = error
        if failed is not None:
            raise failed

    async def kill(self, reason: str, code: str = "", *, having: InstanceId | None = None) -> None:
        """Kill every engine, or the one that has an instance; see ``EngineClient.kill``."""
        for engine in self._engines.values() if having is None else (self._having(having),):
            await engine.kill(reason, code)

    async def stop(self) -> None:
        """End every engine in order, for good."""
        for engine in self._engines.values():
            await engine.stop()

    def _engine(self, kind: EngineKind) -> EngineClient:
        if kind not in self._factories:
            known = ", ".join(sorted(kind.value for kind in self._factories))
            raise UnsupportedModel(
                f"the model asks for an engine of kind {kind.value}, and this worker has {known}"
            )
        if kind not in self._engines:
            engine = self._engines[kind] = self._factories[kind]()
            if self._heard is not None:
                self._read(kind, engine, *self._heard)
        return self._engines[kind]

    def _having(self, instance_id: InstanceId) -> EngineClient:
        """The engine that has an instance; for one that none has, the main engine answers that it
        is not there.
        """
        route = self._routes.get(instance_id)
        return self.main if route is None else self._engines[route.kind]

    def _read(
        self, kind: EngineKind, engine: EngineClient, on_event: OnEvent, on_steps: OnSteps
    ) -> None:
        self._background.spawn(
            f"events of the {kind.value} engine", self._pass_on(kind, engine, on_event, on_steps)
        )

    async def _pass_on(
        self, kind: EngineKind, engine: EngineClient, on_event: OnEvent, on_steps: OnSteps
    ) -> None:
        async for told in engine.events():
            if isinstance(told.message, StepDone):
                steps = [cast("Timed[StepDone]", told), *engine.steps_now()]
                self._steps[kind] = steps[-1].message
                if len(self._engines) > 1:
                    steps = [Timed(self._of_all(one.message), one.sent) for one in steps]
                await on_steps(steps)
                continue
            for event in self._seen(kind, told.message):
                await on_event(told if event is told.message else Timed(event, told.sent))

    def _seen(self, kind: EngineKind, event: EngineEvent) -> tuple[EngineEvent, ...]:
        """An engine's event as the worker is to see it: perhaps not at all, perhaps as several."""
        match event:
            case StageUnloaded():
                self._unloaded(kind, event.instance_id)
            case (
                StageOpened()
                | StageLoaded()
                | StageFailed()
                | StageGrown()
                | StageRefused()
                | StageResized()
                | PipelineLeft()
                | RingUnformed()
                | Prefilled()
            ):
                route = (
                    self._routes.get(event.instance_id) if event.instance_id is not None else None
                )
                if route is not None and route.kind is not kind:
                    # It is about what was here before the instance came back on another engine.
                    return ()
            case StageRenamed():
                self._routes.pop(event.old_id, None)
            case EngineDied():
                return self._of_one(kind, event)
            case _:
                pass
        return (event,)

    def _unloaded(self, kind: EngineKind, instance_id: InstanceId) -> None:
        route = self._routes.get(instance_id)
        if route is None:
            return
        route.unloads[kind] = max(0, route.unloads[kind] - 1)
        if not route.loaded and not route.unloads.total():
            del self._routes[instance_id]

    def _of_one(self, kind: EngineKind, died: EngineDied) -> tuple[EngineEvent, ...]:
        """What died with an engine: everything, where there is no other.

        What it was still to unload of instances that are on another engine by now is free.
        """
        self._steps.pop(kind, None)
        gone = frozenset(
            instance_id for instance_id, route in self._routes.items() if route.kind is kind
        )
        for instance_id in gone:
            del self._routes[instance_id]
        freed = [
            instance_id
            for instance_id, route in self._routes.items()
            for _ in range(route.unloads[kind])
        ]
        for instance_id in freed:
            self._unloaded(kind, instance_id)
        unloaded = (StageUnloaded(instance_id=instance_id) for instance_id in freed)
        return (died if len(self._engines) == 1 else replace(died, instances=gone), *unloaded)

    def _of_all(self, step: StepDone) -> StepDone:
        """A step, with what all engines have after it."""
        return msgspec.structs.replace(
            step,
            **{name: sum(getattr(last, name) for last in self._steps.values()) for name in SUMMED},
        )
