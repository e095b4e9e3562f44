"""The requests of a stage that own no blocks, and whose turn is next.

::

    [ preempted )[ waiting, in the order in which they came )
      oldest ............................... youngest

Preempted ones are first: they ran before. Of those that wait, tenants take turns by weight
(``policy.fairness``), each in its own order; a tenant alone is served in the order of the row.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator

from pilotlight.engine.core.lifecycle import RequestState
from pilotlight.engine.core.request import Request
from pilotlight.policy.fairness import FairTurns
from pilotlight.policy.request import RequestKey


class WaitingRow(Collection[Request]):
    """One stage's."""

    def __init__(self) -> None:
        self._row: OrderedDict[RequestKey, Request] = OrderedDict()
        self._tenants: dict[str, OrderedDict[RequestKey, Request]] = {}
        """Those that never ran, by tenant; none is empty."""
        self._turns = FairTurns()

    def __len__(self) -> int:
        return len(self._row)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._row.values())

    def __contains__(self, request: object) -> bool:
        return request in self._row.values()

    def find(self, key: RequestKey) -> Request | None:
        """The request, if it is here."""
        return self._row.get(key)

    def add(self, request: Request) -> None:
        """Goes to the end of the row."""
        self._row[request.key] = request
        tenant = request.share.tenant
        if tenant not in self._tenants:
            self._tenants[tenant] = OrderedDict()
            self._turns.begin(tenant)
        self._tenants[tenant][request.key] = request

    def put_back(self, request: Request) -> None:
        """Was preempted: it is before all others."""
        self._row[request.key] = request
        self._row.move_to_end(request.key, last=False)

    def first(self) -> Request:
        """Whose turn it is; the row is not empty."""
        oldest = next(iter(self._row.values()))
        if len(self._tenants) < 2 or oldest.state is RequestState.PREEMPTED:
            return oldest
        return next(iter(self._tenants[self._turns.next()].values()))

    def serve(self, request: Request) -> None:
        """Its turn has come: it leaves. What it costs is what it can reach."""
        share = request.share
        if request.key in self._tenants.get(share.tenant, ()):
            self._turns.served(share.tenant, request.kv_tokens, share.weight)
        self.remove(request)

    def remove(self, request: Request) -> None:
        """It leaves without a turn."""
        del self._row[request.key]
        tenant = request.share.tenant
        own = self._tenants.get(tenant)
        if own is not None and own.pop(request.key, None) is not None and not own:
            del self._tenants[tenant]
            self._turns.end(tenant)
