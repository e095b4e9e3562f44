"""The loader's subjects."""

from pilotlight.common.bus import Bus, Subscription
from pilotlight.common.envelope import Timed
from pilotlight.common.messages.hold import (
    NodeHold,
    NodePrefetch,
    node_hold_subject,
    prefetch_subject,
)
from pilotlight.common.messages.room import DISK_ORDER_SUBJECT, DiskOrder, Drop, drop_subject
from pilotlight.common.messages.verify import (
    AskVerification,
    Verify,
    verification_subject,
    verify_subject,
)
from pilotlight.dataplane.disk_tier import DiskTier
from pilotlight.loader.agent import Agent
from pilotlight.loader.verifications import Verifications


class Handlers:
    """Listens to commands for this node."""

    def __init__(
        self, bus: Bus, agent: Agent, verifications: Verifications, disk: DiskTier | None
    ) -> None:
        self._bus = bus
        self._agent = agent
        self._verifications = verifications
        self._disk = disk
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        """Listen from now on."""
        if self._subscriptions:
            return
        node_id = self._agent.node_id
        self._subscriptions = [
            await self._bus.subscribe(
                node_hold_subject(node_id), Timed[NodeHold], self._agent.on_hold
            ),
            await self._bus.subscribe(
                prefetch_subject(node_id), Timed[NodePrefetch], self._agent.on_prefetch
            ),
            await self._bus.serve(drop_subject(node_id), Drop, self._agent.on_drop),
            await self._bus.serve(verify_subject(node_id), Verify, self._verifications.on_verify),
            await self._bus.serve(
                verification_subject(node_id), AskVerification, self._verifications.on_ask
            ),
        ]
        if self._disk is not None:
            self._subscriptions.append(
                await self._bus.subscribe(DISK_ORDER_SUBJECT, DiskOrder, self._on_disk_order)
            )

    async def _on_disk_order(self, order: DiskOrder) -> None:
        if self._disk is not None:
            self._disk.follow(order.models)

    async def stop(self) -> None:
        """Listen no more."""
        subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            await subscription.end()
