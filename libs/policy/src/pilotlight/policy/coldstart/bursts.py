"""Several requests, or starts, at once: by when a start has to be ready for all that wait, and
which groups a burst gets (ParaServe, section 6.1).

A group of s stages whose workers all have room for the model becomes s instances. So a burst that
needs n more instances can have n groups of one worker, or fewer and larger groups, which serve
earlier and have the same number of instances in the end (figure 7).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pilotlight.policy.coldstart.contention import FetchBooks
from pilotlight.policy.coldstart.servers import Server, StartRequest, StartRules, StartScheme


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """Groups that start together."""

    groups: tuple[StartScheme, ...]
    sizes: tuple[int, ...]
    """How many instances each becomes."""
    books: FetchBooks
    """With their fetches."""

    @property
    def instances(self) -> int:
        """That they become."""
        return sum(self.sizes)

    @property
    def missing_slo(self) -> int:
        """Groups that are predicted to miss it."""
        return sum(not group.meets_slo for group in self.groups)


OTHERS = 1.5
"""What the prompt of another request that waits takes of what the oldest one's does, whose length
alone is told: in a mean of few prompts some are longer."""

Choose = Callable[[StartRequest, Sequence[Server], StartRules], StartScheme | None]


def for_all(
    request: StartRequest, servers: Sequence[Server], waiting: int, instances: int
) -> StartRequest | None:
    """The same request with an SLO so much shorter that the last of all prompts that wait is in
    time, too, where an instance computes one after the other; None where the oldest waits alone, or
    no start can be so early.

    Args:
        request: As for the oldest.
        servers: Where it could go.
        waiting: Requests.
        instances: Among which they are shared out.
    """
    others = math.ceil(waiting / max(1, instances)) - 1
    behind_s = OTHERS * others * max((one.prefill_s for one in servers), default=0.0)
    model = request.model
    ttft_ms = model.slo.ttft_ms - 1000 * behind_s
    if others < 1 or ttft_ms <= 1000 * request.waited_s:
        return None
    return replace(request, model=replace(model, slo=replace(model.slo, ttft_ms=ttft_ms)))


def group_sizes(instances: int, size: int) -> tuple[int, ...]:
    """How many instances each group becomes: as many groups of ``size`` as there can be, and one
    with the rest.
    """
    rest = instances % size
    return (size,) * (instances // size) + ((rest,) if rest else ())


def choose_burst(
    request: StartRequest,
    servers: Sequence[Server],
    rules: StartRules,
    instances: int,
    choose: Choose,
) -> Burst:
    """Groups for so many more instances of one model.

    1. for each g up to the bound on s: groups that become g instances, one after the other, each
       with the fetches of those before it in its books, and on workers that they have left
    2. the first g for which everything is placed and meets the SLO: fewer, larger groups share more
       links, so they are taken where they are needed
    3. else the most instances, then the fewest groups that miss the SLO, then the least sum of
       their times to the first token

    Args:
        request: The model, and the books of now; its ``instances`` does not count.
        servers: Where it could go.
        rules: The bound on s.
        instances: How many more there are to be.
        choose: Where one group goes: a policy of ``policies.CHOICES``.
    """
    best: Burst | None = None
    for size in range(1, max(1, min(rules.max_stages, instances)) + 1):  # 1
        burst = _placed(request, servers, rules, group_sizes(instances, size), choose)
        if burst.instances == instances and burst.missing_slo == 0:  # 2
            return burst
        if best is None or _rank(burst) < _rank(best):  # 3
            best = burst
    return best or Burst(groups=(), sizes=(), books=request.books)


def _rank(burst: Burst) -> tuple[int, int, float]:
    waited_s = sum(group.ttft_s for group in burst.groups)
    return -burst.instances, burst.missing_slo, waited_s


def _placed(
    request: StartRequest,
    servers: Sequence[Server],
    rules: StartRules,
    sizes: Sequence[int],
    choose: Choose,
) -> Burst:
    groups: list[StartScheme] = []
    books, left = request.books, list(servers)
    for number, size in enumerate(sizes):
        group = choose(replace(request, instances=size, books=books), left, rules)
        if group is None or group.refusal:
            break
        groups.append(group)
        books = books.admit(group.newcomers(f"{number}"), request.now_s)
        taken = {stage.worker_id for stage in group.stages}
        left = [one for one in left if one.worker_id not in taken]
    return Burst(groups=tuple(groups), sizes=tuple(sizes[: len(groups)]), books=books)
