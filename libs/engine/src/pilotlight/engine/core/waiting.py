"""The requests of a stage that own no blocks, and whose turn is next.

::

    [ preempted )[ waiting, in the order in which they came )
      oldest ............................... youngest

Preempted ones are first: they ran before. Of those that wait, tenants take turns by weight
(``policy.fairness``), each in its own order; a tenant alone is served in the order of the row.

Of one tenant's, those go first whose first token can still come in time, so that most of them do
(``promises``). Those that are late follow in their order. After ``OVERTAKEN`` that overtook others,
the oldest that is late has its turn, or else the oldest of all: none waits for ever.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import Protocol

from pilotlight.engine.core.lifecycle import RequestState
from pilotlight.engine.core.request import Request
from pilotlight.policy.fairness import FairTurns
from pilotlight.policy.request import RequestKey

OVERTAKEN = 16


class Order(Protocol):
    """What promises make of those that wait."""

    def in_time(self, request: Request) -> bool:
        """Whether a request's first token can still come in time."""
        ...

    def choice(self, timely: Collection[Request]) -> Request:
        """Which of those that can be in time is next; there is one."""
        ...


class _Own:
    """What waits of one tenant."""

    def __init__(self) -> None:
        self.timely: OrderedDict[RequestKey, Request] = OrderedDict()
        """Or not found late yet."""
        self.late: OrderedDict[RequestKey, Request] = OrderedDict()
        self._overtook = 0

    def __bool__(self) -> bool:
        return bool(self.timely or self.late)

    def first(self, order: Order) -> Request:
        """Whose turn it is; there is one."""
        while self.timely:
            key, request = next(iter(self.timely.items()))
            if order.in_time(request):
                break
            self.late[key] = self.timely.pop(key)
        if self.timely and self._overtook < OVERTAKEN:
            return order.choice(self.timely.values())
        return next(iter((self.late or self.timely).values()))

    def serve(self, request: Request) -> None:
        """Its turn has come."""
        foremost = next(iter(self.timely), None)
        overtakes = request.key in self.timely and (bool(self.late) or request.key != foremost)
        self._overtook = self._overtook + 1 if overtakes else 0

    def remove(self, key: RequestKey) -> bool:
        """It leaves; whether it was here."""
        found = self.timely.pop(key, None) or self.late.pop(key, None)
        return found is not None


class WaitingRow(Collection[Request]):
    """One stage's."""

    def __init__(self) -> None:
        self._row: OrderedDict[RequestKey, Request] = OrderedDict()
        self._tenants: dict[str, _Own] = {}
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
            self._tenants[tenant] = _Own()
            self._turns.begin(tenant)
        self._tenants[tenant].timely[request.key] = request

    def put_back(self, request: Request) -> None:
        """Was preempted: it is before all others."""
        self._row[request.key] = request
        self._row.move_to_end(request.key, last=False)

    def first(self, order: Order) -> Request:
        """Whose turn it is; the row is not empty."""
        oldest = next(iter(self._row.values()))
        if oldest.state is RequestState.PREEMPTED:
            return oldest
        alone = len(self._tenants) == 1
        tenant = next(iter(self._tenants)) if alone else self._turns.next()
        return self._tenants[tenant].first(order)

    def serve(self, request: Request) -> None:
        """Its turn has come: it leaves. What it costs is what it can reach."""
        share, own = request.share, self._tenants.get(request.share.tenant)
        if own is not None and request.state is RequestState.WAITING:
            own.serve(request)
            self._turns.served(share.tenant, request.kv_tokens, share.weight)
        self.remove(request)

    def remove(self, request: Request) -> None:
        """It leaves without a turn."""
        del self._row[request.key]
        tenant = request.share.tenant
        own = self._tenants.get(tenant)
        if own is not None and own.remove(request.key) and not own:
            del self._tenants[tenant]
            self._turns.end(tenant)
