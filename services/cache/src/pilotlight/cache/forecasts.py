"""Which models may soon need another instance, and on which nodes one has room.

The scheduler's own forecast (``policy/load.py``), made of what the cache hears itself: arrivals,
and what workers report. So it needs no word of a leader, and there is one while there is none.
"""

from collections import defaultdict
from collections.abc import Mapping

from pilotlight.cache.books import Books
from pilotlight.policy.cluster import RESIDENT, HeldStage, HeldState
from pilotlight.policy.cost import stage_room
from pilotlight.policy.ids import Digest, InstanceId, ModelName, NodeId
from pilotlight.policy.load import may_need_another
from pilotlight.policy.model import Model
from pilotlight.policy.placement import why_unusable
from pilotlight.policy.plan import Snapshot
from pilotlight.policy.scaling import ScalingRules

KEPT_S = 30.0
"""A forecast holds for so long after load last asked for it: a fetch is not begun and left in turn.
"""
_CARRIES = frozenset({HeldState.LOADING, HeldState.READY})


class Forecasts:
    """One owner, the keeper."""

    def __init__(self, books: Books, rules: ScalingRules) -> None:
        """Expects nothing yet.

        Args:
            books: Reports, registrations, arrivals, estimates.
            rules: What an instance carries, and which load is low.
        """
        self._books = books
        self._low_requests = rules.low_load * rules.instance_requests
        self._until_s: dict[ModelName, float] = {}

    def next_on(self, now_s: float) -> Mapping[Digest, frozenset[NodeId]]:
        """Models of which one more instance may soon be needed, and the nodes with free room for it
        on a device.

        Args:
            now_s: On the clock of reports and arrivals.
        """
        snapshot = Snapshot(
            now_s=now_s,
            epoch=self._books.epoch,
            estimates=self._books.estimates,
            arrivals=self._books.arrivals.recent(),
        )
        for name, stages in self._carried().items():
            model = self._books.models.by_name.get(name)
            requests = sum(stages.values())
            if model is not None and may_need_another(
                model, len(stages), requests, self._low_requests, snapshot
            ):
                self._until_s[name] = now_s + KEPT_S
        self._until_s = {name: until for name, until in self._until_s.items() if until > now_s}
        found: dict[Digest, frozenset[NodeId]] = {}
        for name in self._until_s:
            model = self._books.models.by_name.get(name)
            if model is not None:
                here = self._with_room(model)
                found[model.digest] = found.get(model.digest, frozenset()) | here
        return found

    def _carried(self) -> Mapping[ModelName, Mapping[InstanceId, int]]:
        """Requests by instance: each stage of a group has the same ones."""
        found: defaultdict[ModelName, dict[InstanceId, int]] = defaultdict(dict)
        for one in self._stages():
            there = found[one.model]
            there[one.instance_id] = max(one.in_flight, there.get(one.instance_id, 0))
        return found

    def _stages(self) -> list[HeldStage]:
        return [
            one
            for worker_id in self._books.roster.workers
            if (worker := self._books.worker(worker_id)) is not None
            for one in worker.held
            if one.state in _CARRIES
        ]

    def _with_room(self, model: Model) -> frozenset[NodeId]:
        """Nodes with a worker that may be given the model now, and has its room free."""
        found: set[NodeId] = set()
        for worker_id in self._books.roster.workers:
            worker = self._books.worker(worker_id)
            if worker is None or why_unusable(worker, self._books.node(worker.node_id)):
                continue
            room = stage_room(model, model.spec.whole, worker.device.granule_bytes)
            has_it = any(
                one.digest == model.digest and one.state in RESIDENT for one in worker.held
            )
            if not has_it and room.least_bytes <= self._books.device_free_bytes(worker):
                found.add(worker.node_id)
        return frozenset(found)
