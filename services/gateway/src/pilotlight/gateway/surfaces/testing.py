"""Doubles for tests of the other shapes."""

from dataclasses import dataclass, field

from pilotlight.gateway.surfaces.responses.store import StoredResponse, no_response


@dataclass(slots=True)
class KeptResponses:
    """Keeps responses in memory."""

    rows: dict[tuple[str, str], StoredResponse] = field(
        default_factory=dict[tuple[str, str], StoredResponse]
    )
    full: bool = False
    """It stores nothing."""

    async def put(self, key_id: str, stored: StoredResponse) -> bool:
        """As ``ResponseStore.put``."""
        if not self.full:
            self.rows[key_id, stored.response.id] = stored
        return not self.full

    async def get(self, key_id: str, response_id: str) -> StoredResponse:
        """As ``ResponseStore.get``."""
        if (key_id, response_id) not in self.rows:
            raise no_response(response_id)
        return self.rows[key_id, response_id]

    async def remove(self, key_id: str, response_id: str) -> None:
        """As ``ResponseStore.remove``."""
        await self.get(key_id, response_id)
        del self.rows[key_id, response_id]
