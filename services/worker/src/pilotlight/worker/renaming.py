"""Stages of groups that have become whole: each is an instance of its own from now on
(``policy.control.splitting``).

::

    hold of the new instance, made of the old one's stage
        the stage is in its pipeline still      nothing: it leaves that when its lead is alone
        the engine is asked                     the stage stays what it was meanwhile
        the engine says that it is renamed      reported under the new name
        the engine refuses                      the stage fails, and the new instance is loaded anew
"""

from collections.abc import Callable, Iterable

import structlog

from pilotlight.common.errors import EngineFailed, PilotlightError, error_of
from pilotlight.common.messages.engine import StageRefused
from pilotlight.common.messages.hold import Hold
from pilotlight.common.messages.pipelines import RenameStage, StageRenamed
from pilotlight.policy.cluster import HeldState
from pilotlight.policy.ids import InstanceId
from pilotlight.worker.core import WorkerCore
from pilotlight.worker.held import Held
from pilotlight.worker.held_table import HeldTable
from pilotlight.worker.unloads import Unloads

log = structlog.get_logger()


class Renames:
    """What is asked of the engine, and what comes of it."""

    def __init__(
        self,
        core: WorkerCore,
        held: HeldTable,
        unloads: Unloads,
        failed: Callable[[Held, PilotlightError], None],
    ) -> None:
        """Asks nothing yet.

        Args:
            core: the worker's.
            held: its stages.
            unloads: frees what nobody wants any more.
            failed: a stage cannot be renamed, and is let go.
        """
        self._core = core
        self._held = held
        self._unloads = unloads
        self._failed = failed

    def begin(self, holds: Iterable[Hold]) -> None:
        """Have stages be those of other instances, as far as they are in no pipeline any more."""
        for hold in holds:
            assert hold.grown_from is not None, "only what grew out of a group is renamed"
            held = self._held[hold.grown_from]
            if not held.joined and held.renaming is None:
                held.renaming = hold
                self._core.background.spawn(
                    f"rename {hold.grown_from}", self._ask(hold.grown_from, hold.instance_id)
                )

    def on_renamed(self, event: StageRenamed) -> None:
        """The engine knows the stage by its new name."""
        held = self._held.get(event.old_id)
        if held is None or held.renaming is None or held.state is not HeldState.READY:
            # It was let go under its old name, which the engine did not know any more.
            unloaded = self._unloads.begin(event.instance_id)
            self._core.background.spawn(
                f"unload {event.instance_id}", self._unloads.ask(event.instance_id, unloaded)
            )
            return
        hold, held.renaming = held.renaming, None
        self._held.rename(held, hold)
        held.open = True
        held.has_kv(event.kv_capacity_tokens)
        log.info(
            "a stage of a group is an instance",
            action="stage_renamed",
            instance_id=event.instance_id,
            was=event.old_id,
        )

    def on_refused(self, refused: StageRefused) -> None:
        """The engine does not rename it."""
        held = self._held.get(refused.instance_id) if refused.instance_id is not None else None
        if held is not None and held.renaming is not None:
            held.renaming = None
            if held.state is HeldState.READY:
                self._failed(held, error_of(refused.code, refused.message))

    async def _ask(self, instance_id: InstanceId, new_id: InstanceId) -> None:
        try:
            command = RenameStage(instance_id=instance_id, new_id=new_id)
            await self._core.engine.rename_stage(command)
        except EngineFailed as error:
            # The stage is told of the engine's end by itself.
            log.warning("a stage is not renamed", action="stage_not_renamed", error=error.message)
