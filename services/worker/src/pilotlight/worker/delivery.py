"""What the engine gave its requests, on its way to the gateways."""

from collections.abc import Collection, Iterator, Sequence

from pilotlight.common.envelope import Timed
from pilotlight.common.messages.engine import Produced, StepDone
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.phase import Moment
from pilotlight.policy.request import RequestKey
from pilotlight.worker.core import WorkerCore
from pilotlight.worker.publisher import TokenPublisher
from pilotlight.worker.requests import RequestTable
from pilotlight.worker.tracing import PrefillSpans

_Sampled = tuple[Produced, Moment | None]
"""What the engine gave a request, and when."""


Pieces = tuple[list[Produced], Moment | None]
"""What some steps gave a request, each going on where the one before it ended, and when it had the
first."""


def joined(given: Sequence[tuple[Sequence[Produced], Moment | None]]) -> Iterator[Pieces]:
    """What steps gave, each request's together: it costs its way once, and not with each step.

    Tokens with log probabilities stay apart. So does what does not go on where the step before it
    ended: an engine's books are wrong there, and whatever came before is told first.
    """
    runs: dict[RequestId, Pieces] = {}
    for produced, sampled in given:
        for one in produced:
            run = runs.get(one.request_id)
            if run is None:
                runs[one.request_id] = ([one], sampled)
                continue
            before = run[0][-1]
            count = len(before.token_ids)
            if (
                count
                and one.position == before.position + count
                and one.attempt == before.attempt
                and before.finish is before.logprobs is one.logprobs is None
            ):
                run[0].append(one)
            else:
                yield from runs.values()
                runs = {one.request_id: ([one], sampled)}
    yield from runs.values()


def source_of(table: RequestTable, steps: Sequence[Timed[StepDone]]) -> InstanceId | None:
    """An instance of the engine that took steps, if one is known: they are one engine's."""
    instances = (
        table.instance_of(RequestKey(one.request_id, one.attempt))
        for told in steps
        for one in told.message.produced
    )
    return next((one for one in instances if one is not None), None)


class TokenDelivery:
    """Tokens, and ends, of the requests of one worker.

    What comes of a stage of which it is still to be found that its parts were whole is kept back,
    until ``release`` or ``discard``.
    """

    def __init__(self, core: WorkerCore, spans: PrefillSpans) -> None:
        self._core = core
        self._spans = spans
        self._publisher = TokenPublisher(
            core.bus, core.clock, core.background, core.worker_id, core.table
        )
        self._kept: dict[InstanceId, list[_Sampled]] = {}

    async def drain(self) -> None:
        """Send what is left."""
        await self._publisher.drain()

    def take(self, steps: Sequence[Timed[StepDone]], unproven: Collection[InstanceId]) -> bool:
        """Hand the tokens of steps out, or keep them back; true when a request has ended.

        Args:
            steps: with the moments at which they had them.
            unproven: instances whose tokens are kept back; most of the time there are none.

        Raises:
            InternalError: the engine's books are wrong.
        """
        given = [(told.message.produced, told.sent) for told in steps]
        if unproven:
            given = [
                (self._keep_back(produced, sampled, unproven), sampled)
                for produced, sampled in given
            ]
        return self._hand_out(given)

    def release(self, instance_id: InstanceId) -> bool:
        """The parts were whole: hand out what was kept back; true when a request has ended.

        Raises:
            InternalError: the engine's books are wrong.
        """
        kept = self._kept.pop(instance_id, [])
        return self._hand_out([((one,), sampled) for one, sampled in kept])

    def discard(self, instance_id: InstanceId) -> None:
        """The parts were not whole, or the engine is gone: forget what was kept back."""
        self._kept.pop(instance_id, None)

    def discard_all(self) -> None:
        """The engine is gone with all instances."""
        self._kept.clear()

    def fail(self, code: str, message: str, instance_id: InstanceId | None = None) -> None:
        """End the requests of one instance, or all, with an error."""
        for unsent in self._core.table.fail(
            code, message, self._core.clock.monotonic_s(), instance_id
        ):
            self._spans.end(unsent.key)
            self._publisher.add(unsent)
        self._publisher.flush()

    def _keep_back(
        self,
        produced: Sequence[Produced],
        sampled: Moment | None,
        unproven: Collection[InstanceId],
    ) -> tuple[Produced, ...]:
        """What may leave; the rest is kept."""
        now: list[Produced] = []
        for one in produced:
            instance_id = self._core.table.instance_of(RequestKey(one.request_id, one.attempt))
            if instance_id is not None and instance_id in unproven:
                self._kept.setdefault(instance_id, []).append((one, sampled))
            else:
                now.append(one)
        return tuple(now)

    def _hand_out(self, given: Sequence[tuple[Sequence[Produced], Moment | None]]) -> bool:
        table, metrics, add = self._core.table, self._core.metrics, self._publisher.add
        now_s = self._core.clock.monotonic_s()
        spans = self._spans.any
        tokens, ended = 0, False
        try:
            for pieces, sampled in joined(given):
                first, last = pieces[0], pieces[-1]
                if spans:
                    self._spans.end(RequestKey(first.request_id, first.attempt))
                tokens += last.position + len(last.token_ids) - first.position
                if last.finish is not None:
                    ended = True
                    metrics.ended(last.finish)
                unsent = table.produced(first, now_s, *pieces[1:])
                if unsent is not None:
                    add(unsent, sampled)
        finally:
            # Also of steps in which something is wrong: what was handed out before it is right.
            metrics.gave(tokens)
            self._publisher.flush(ended=ended)
        if ended:
            metrics.running.set(table.running)
        return ended
