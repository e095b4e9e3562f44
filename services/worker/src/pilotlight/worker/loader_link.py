"""The supervision connection to the node's loader: its close is how the loader learns at once of
this process's death.
"""

import asyncio
import os
import signal

import structlog

from pilotlight.common.service import Background
from pilotlight.common.waiting import cancel_all
from pilotlight.dataplane.pool_client import PoolClient
from pilotlight.dataplane.report_connection import ReportRelay
from pilotlight.policy.ids import WorkerId

log = structlog.get_logger()


class LoaderLink:
    """A component that keeps one worker's connection.

    Without a loader for the grace, the whole process ends in order.
    """

    def __init__(
        self,
        client: PoolClient,
        background: Background,
        worker_id: WorkerId,
        relay: ReportRelay,
    ) -> None:
        """Not connected yet.

        Args:
            client: makes the connection.
            background: owns what keeps it.
            worker_id: the worker.
            relay: gives the worker's reports to the loader.
        """
        self._relay = relay
        self._client = client
        self._background = background
        self._worker_id = worker_id
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to connect; a loader that is not there yet is waited for in the background."""
        if self._task is None:
            self._task = self._background.spawn(f"hello of {self._worker_id}", self._greet())

    async def stop(self) -> None:
        """Close the connection."""
        task, self._task = self._task, None
        if task is not None:
            await cancel_all((task,))

    async def _greet(self) -> None:
        await self._client.hello(self._worker_id, relay=self._relay)
        log.error("the loader is gone: ending", action="worker_orphaned", worker_id=self._worker_id)
        # As if the loader had asked for it: everything stops in order, and the exit status says
        # that nothing was wrong here.
        os.kill(os.getpid(), signal.SIGTERM)
