"""This gateway in the bucket ``gateways``: put at start and every few seconds, removed at an
orderly stop.

A killed gateway cannot sign off: the others remove it when they have not heard it for a minute. One
that was only stopped for so long puts itself there again.
"""

import asyncio
from collections.abc import Callable

import structlog

from pilotlight.common.buckets import GATEWAYS, Bucket
from pilotlight.common.bus import Bus
from pilotlight.common.clock import Clock
from pilotlight.common.errors import BusUnavailable
from pilotlight.common.messages.reports import GatewayInfo
from pilotlight.common.service import Background
from pilotlight.common.waiting import cancel_all, every
from pilotlight.policy.ids import GatewayId

log = structlog.get_logger()

REPEAT_S = 10.0
GONE_AFTER_S = 60.0


class Presence:
    """A component; started after the server, so that the URL answers."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        background: Background,
        gateway_id: GatewayId,
        url: Callable[[], str],
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._background = background
        self._gateway_id = gateway_id
        self._url = url
        self._bucket: Bucket | None = None
        self._heard_s: dict[str, float] = {}
        """When each other gateway was heard."""
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Say where this gateway is from now on.

        Raises:
            BusUnavailable: the bucket cannot be opened.
        """
        if self._bucket is None:
            self._bucket = await self._bus.bucket(GATEWAYS)
            try:
                await self._say()
            except BusUnavailable as error:
                # It is said again; what is warm can be served without it.
                log.warning(
                    "could not say where this gateway is",
                    action="presence_deferred",
                    error=error.message,
                )
            self._bus.on_reconnect(self._say)
            self._tasks = [
                self._background.spawn(
                    "watch gateways", self._bucket.watch(GatewayInfo, self._on_gateway)
                ),
                self._background.spawn("say where this gateway is", self._repeat()),
            ]

    async def stop(self) -> None:
        """Say that it is gone."""
        if self._bucket is None:
            return
        bucket, self._bucket = self._bucket, None
        await cancel_all(self._tasks)
        try:
            await bucket.delete(self._gateway_id)
        except BusUnavailable as error:
            log.warning("could not sign off", action="presence_kept", error=error.message)

    async def remove_silent(self) -> None:
        """Remove gateways that have been silent for too long; while NATS is lost none can be heard.

        Raises:
            BusUnavailable: the server did not confirm.
        """
        now_s = self._clock.monotonic_s()
        if self._bucket is None or not self._bus.connected:
            self._heard_s = dict.fromkeys(self._heard_s, now_s)
            return
        for gateway_id in [
            key for key, heard_s in self._heard_s.items() if now_s - heard_s > GONE_AFTER_S
        ]:
            log.warning("gateway is gone", action="gateway_gone", gateway_id=gateway_id)
            await self._bucket.delete(gateway_id)
            self._heard_s.pop(gateway_id, None)

    async def _repeat(self) -> None:
        async for _ in every(REPEAT_S):
            try:
                await self._say()
                await self.remove_silent()
            except BusUnavailable as error:
                log.warning(
                    "could not say where this gateway is",
                    action="presence_deferred",
                    error=error.message,
                )

    async def _say(self) -> None:
        """Also after a reconnect: the server may have come back without its memory."""
        if self._bucket is not None:
            await self._bucket.put(
                self._gateway_id, GatewayInfo(gateway_id=self._gateway_id, url=self._url())
            )

    async def _on_gateway(self, key: str, info: GatewayInfo | None) -> None:
        if info is None:
            self._heard_s.pop(key, None)
        elif key != self._gateway_id:
            self._heard_s[key] = self._clock.monotonic_s()
