"""Follows a small whole system on a bus without faults, and keeps what must never be seen."""

from collections import Counter

from pilotlight.common.messages.reports import WorkerReport
from pilotlight.common.messages.tokens import Resend, Submit
from pilotlight.policy.cluster import HeldState
from pilotlight.policy.ids import InstanceId, ModelName
from pilotlight.policy.instance import SERVING, STARTING
from pilotlight.policy.model import Model
from pilotlight.policy.plan import Instance

RESIDENT = frozenset({HeldState.LOADING, HeldState.READY, HeldState.DRAINING})


class Watch:
    """Follows a system on a bus without faults, and keeps what must never be seen."""

    def __init__(self, models: dict[ModelName, Model], device_bytes: int) -> None:
        self.wrong: list[str] = []
        self.seen: Counter[str] = Counter()
        """How often the gateway had to go to some length."""
        self._models = models
        self._device_bytes = device_bytes
        self._alive: dict[InstanceId, ModelName] = {}

    async def on_instance(self, key: str, instance: Instance | None) -> None:
        self._alive.pop(InstanceId(key), None)
        if instance is None or instance.state not in STARTING | SERVING:
            return
        self._alive[instance.instance_id] = instance.model
        counts = Counter(self._alive.values())
        for name, count in counts.items():
            if count > self._models[name].scaling.max_instances:
                self.wrong.append(f"{count} instances of {name} at a time: {sorted(self._alive)}")

    async def on_submit(self, submit: Submit) -> None:
        if submit.attempt > 1:
            self.seen["resumed" if submit.output_ids else "tried_again"] += 1

    async def on_resend(self, resend: Resend) -> None:
        self.seen["resends"] += 1

    async def on_report(self, report: WorkerReport) -> None:
        facts = report.facts
        resident = [held for held in facts.held if held.state in RESIDENT]
        if sum(held.device_bytes for held in resident) > self._device_bytes:
            self.wrong.append(f"{facts.worker_id} holds more than its device has: {resident}")
