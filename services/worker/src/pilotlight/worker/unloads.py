"""Unloads that the engine was asked for and has not confirmed."""

import asyncio
from collections import defaultdict, deque
from collections.abc import Collection

from pilotlight.common.errors import DeadlineExceeded, EngineFailed
from pilotlight.common.messages.engine import UnloadStage
from pilotlight.common.waiting import within
from pilotlight.policy.ids import InstanceId
from pilotlight.worker.core import WorkerCore

KILLED_DEADLINE_S = 10.0
LOST_UNLOAD_S = 300.0
"""An engine that has freed no memory by then has lost the command; one that hangs its own watch
finds much earlier."""


class Unloads:
    """Asks the engine to free stages, and knows which it has not freed yet, in order.

    An instance may stand here more than once: its next stage can be unloaded while the engine has
    not confirmed the one before.
    """

    def __init__(self, core: WorkerCore) -> None:
        self._core = core
        self._asked: defaultdict[InstanceId, deque[asyncio.Future[None]]] = defaultdict(deque)

    def begin(self, instance_id: InstanceId) -> asyncio.Future[None]:
        """An unload that is to be asked for: done when the memory is free."""
        unloaded = asyncio.get_running_loop().create_future()
        self._asked[instance_id].append(unloaded)
        return unloaded

    async def ask(self, instance_id: InstanceId, unloaded: asyncio.Future[None]) -> None:
        """Have the engine free a stage.

        An engine that is dead, or is killed because it does not answer, has freed it too.
        """
        try:
            await self._core.engine.unload_stage(UnloadStage(instance_id=instance_id))
            await within(LOST_UNLOAD_S, asyncio.shield(unloaded), "unloading a stage")
        except EngineFailed:
            # Its death may have been told before this was asked: then nothing else answers it.
            waiting = self._asked[instance_id]
            if unloaded in waiting:
                waiting.remove(unloaded)
                unloaded.set_result(None)
        except DeadlineExceeded as error:
            await self._core.engine.kill(error.message, having=instance_id)
            await within(KILLED_DEADLINE_S, unloaded, "killing an engine that does not unload")

    def on_unloaded(self, instance_id: InstanceId) -> None:
        """The engine has freed the stage that it was asked for first."""
        waiting = self._asked[instance_id]
        if waiting:
            waiting.popleft().set_result(None)
        if not waiting:
            del self._asked[instance_id]

    def on_engine_died(self, instances: Collection[InstanceId] | None) -> None:
        """The engine is gone with these instances, or with all: their memory is free."""
        for instance_id in list(self._asked):
            if instances is None or instance_id in instances:
                for unloaded in self._asked.pop(instance_id):
                    unloaded.set_result(None)
