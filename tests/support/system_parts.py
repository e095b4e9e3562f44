"""Services of a small whole system in one process, and what surrounds them."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pilotlight.common.errors import PilotlightError
from pilotlight.common.faulty_bus import FaultyBus
from pilotlight.common.nats_bus import NatsBus
from pilotlight.common.service import Component, Context
from pilotlight.common.settings import BusSettings, DatabaseSettings


@dataclass(slots=True, kw_only=True)
class Part:
    """One service of the system."""

    name: str
    bus: FaultyBus
    raw: NatsBus
    context: Context[Any]
    components: list[Component]

    async def stop(self) -> None:
        """End it in order."""
        for component in reversed(self.components):
            await component.stop()
        await self.context.background.stop()
        await self.bus.close()

    async def kill(self) -> None:
        """End it without a word to any service, as far as that can be done within a process."""
        await self.raw.client.close()
        await self.context.background.stop()
        for component in reversed(self.components):
            with suppress(PilotlightError):
                await component.stop()
        await self.bus.close()


@dataclass(slots=True, kw_only=True)
class Surroundings:
    """What every system of a test run shares."""

    bus_settings: BusSettings
    folder: Path
    database_settings: Callable[[str], DatabaseSettings]
    vocab_size: int
