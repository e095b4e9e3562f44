"""Whose request it is, and what the request itself says of how it is to be answered."""

from collections.abc import Mapping
from typing import Protocol

import msgspec

from pilotlight.gateway.auth import KeyInfo
from pilotlight.gateway.serving.starts import ColdStart
from pilotlight.gateway.tenants.keys import Role
from pilotlight.policy.ids import RequestId


class Keys(Protocol):
    """Who may ask (``Authenticator``)."""

    async def require(self, headers: Mapping[str, str], role: Role) -> KeyInfo:
        """Whose request it is.

        Raises:
            Unauthorized, Forbidden: it may not be answered.
        """
        ...


class Asker(msgspec.Struct, frozen=True, kw_only=True):
    """Whose request it is, which it is, and what its headers ask for."""

    request_id: RequestId
    key: KeyInfo
    arrived_s: float
    cold_start: ColdStart = ColdStart.ALLOW
    paced: bool = True
    """Rates and places of its key hold for it; for lines of batches only budgets do."""
