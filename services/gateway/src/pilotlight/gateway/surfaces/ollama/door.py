"""Access to Ollama's API: clients with a key, and those at named addresses without one.

A browser can be made to send requests to any address by any page. So what comes without a key must
not come from a page (``Origin``), and must name this machine (``Host``): a page whose own name
leads here by DNS sends that name.
"""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.requests import Request

from pilotlight.gateway.auth import KeyInfo
from pilotlight.gateway.edge.addresses import Network, is_from

KEYLESS = KeyInfo("ollama", "inference", "ollama clients without a key")
"""Whose usage that is."""


@dataclass(frozen=True, slots=True)
class Door:
    """Tells which requests need no key."""

    networks: Sequence[Network]
    public_host: str
    """A name by which clients reach the gateway, beside its addresses; empty: none."""

    @classmethod
    def of(cls, clients: Sequence[str], public_url: str) -> "Door":
        """From the settings.

        Raises:
            ValueError: an address is none.
        """
        networks = tuple(ipaddress.ip_network(client) for client in clients)
        return cls(networks, urlsplit(public_url).hostname or "")

    def keyless(self, request: Request) -> KeyInfo | None:
        """Whose request it is without a key; None where it needs one."""
        headers = request.headers
        if "authorization" in headers or "origin" in headers:
            return None
        if not self._is_own(headers.get("host", "")):
            return None
        return KEYLESS if is_from(self.networks, request) else None

    def _is_own(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
            ipaddress.ip_address(name)
        except ValueError:
            return host.partition(":")[0].lower() in {"localhost", self.public_host} - {""}
        return True
