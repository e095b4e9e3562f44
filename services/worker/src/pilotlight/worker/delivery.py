"""What the engine gave its requests, on its way to the gateways."""

from collections.abc import Callable, Iterable

from pilotlight.common.messages.engine import Produced
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.phase import Moment
from pilotlight.policy.request import RequestKey
from pilotlight.worker.core import WorkerCore
from pilotlight.worker.publisher import TokenPublisher
from pilotlight.worker.tracing import PrefillSpans

_Sampled = tuple[Produced, Moment | None]
"""What the engine gave a request, and when."""


class TokenDelivery:
    """Tokens, and ends, of the requests of one worker.

    What comes of a stage of which it is still to be found that its parts were whole is kept back,
    until ``release`` or ``discard``.
    """

    def __init__(self, core: WorkerCore, spans: PrefillSpans) -> None:
        self._core = core
        self._spans = spans
        self._publisher = TokenPublisher(core.bus, core.background, core.worker_id)
        self._kept: dict[InstanceId, list[_Sampled]] = {}

    async def drain(self) -> None:
        """Send what is left."""
        await self._publisher.drain()

    def take(
        self,
        produced: Iterable[Produced],
        sampled: Moment | None,
        unproven: Callable[[InstanceId], bool],
    ) -> bool:
        """Hand a step's tokens out, or keep them back; true when a request has ended.

        Raises:
            InternalError: the engine's books are wrong.
        """
        now: list[_Sampled] = []
        for one in produced:
            instance_id = self._core.table.instance_of(RequestKey(one.request_id, one.attempt))
            if instance_id is not None and unproven(instance_id):
                self._kept.setdefault(instance_id, []).append((one, sampled))
            else:
                now.append((one, sampled))
        return self._hand_out(now)

    def release(self, instance_id: InstanceId) -> bool:
        """The parts were whole: hand out what was kept back; true when a request has ended.

        Raises:
            InternalError: the engine's books are wrong.
        """
        return self._hand_out(self._kept.pop(instance_id, []))

    def discard(self, instance_id: InstanceId) -> None:
        """The parts were not whole, or the engine is gone: forget what was kept back."""
        self._kept.pop(instance_id, None)

    def discard_all(self) -> None:
        """The engine is gone with all instances."""
        self._kept.clear()

    def fail(self, code: str, message: str, instance_id: InstanceId | None = None) -> None:
        """End the requests of one instance, or all, with an error."""
        for outgoing in self._core.table.fail(
            code, message, self._core.clock.monotonic_s(), instance_id
        ):
            self._spans.end(RequestKey(outgoing.entry.request_id, outgoing.entry.attempt))
            self._publisher.add(outgoing)
        self._publisher.flush()

    def _hand_out(self, produced: list[_Sampled]) -> bool:
        for one, sampled in produced:
            self._on_produced(one, sampled)
        self._publisher.flush()
        ended = any(one.finish is not None for one, _ in produced)
        if ended:
            self._core.metrics.running.set(self._core.table.running)
        return ended

    def _on_produced(self, produced: Produced, sampled: Moment | None) -> None:
        self._spans.end(RequestKey(produced.request_id, produced.attempt))
        self._core.metrics.tokens.inc(len(produced.token_ids))
        if produced.finish is not None:
            self._core.metrics.finished.labels(finish=produced.finish.value).inc()
        outgoing = self._core.table.produced(produced, self._core.clock.monotonic_s())
        if outgoing is not None:
            self._publisher.add(outgoing, sampled)
