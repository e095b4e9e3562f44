"""This gateway in the bucket ``gateways``: put at start, removed at an orderly stop. A killed one stays until an operator looks."""

from collections.abc import Callable

import structlog

from pilotlight.common.buckets import GATEWAYS, Bucket
from pilotlight.common.bus import Bus
from pilotlight.common.errors import BusUnavailable
from pilotlight.common.messages.reports import GatewayInfo
from pilotlight.policy.types import GatewayId

log = structlog.get_logger()


class Presence:
    """A component; started after the server, so that the URL answers."""

    def __init__(self, bus: Bus, gateway_id: GatewayId, url: Callable[[], str]) -> None:
        self._bus = bus
        self._gateway_id = gateway_id
        self._url = url
        self._bucket: Bucket | None = None

    async def start(self) -> None:
        """Say where this gateway is.

        Raises:
            BusUnavailable: the server did not confirm.
        """
        if self._bucket is None:
            self._bucket = await self._bus.bucket(GATEWAYS)
            await self._say()
            self._bus.on_reconnect(self._say)

    async def _say(self) -> None:
        """Also after a reconnect: the server may have come back without its memory."""
        if self._bucket is not None:
            await self._bucket.put(self._gateway_id, GatewayInfo(gateway_id=self._gateway_id, url=self._url()))

    async def stop(self) -> None:
        """Say that it is gone."""
        if self._bucket is None:
            return
        bucket, self._bucket = self._bucket, None
        try:
            await bucket.delete(self._gateway_id)
        except BusUnavailable as error:
            log.warning("could not sign off", action="presence_kept", error=error.message)
