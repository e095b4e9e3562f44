"""How the tokens of one forward pass are shared among requests."""

from collections.abc import Mapping
from itertools import islice

from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.core.request import Request
from pilotlight.policy.request import RequestKey


def prompt_cap(limits: BatchLimits, running: Mapping[RequestKey, Request]) -> int:
    """Tokens that a step may run of one prompt: fewer where it also gives streams their next."""
    chunk, whole = limits.chunk_tokens, limits.step_tokens
    if chunk is None or not any(request.wanted == 1 for request in running.values()):
        return whole
    return min(chunk, whole)


def share_tokens(
    running: Mapping[RequestKey, Request], at_most: int | None, step_tokens: int, cap: int
) -> dict[RequestKey, int]:
    """How many tokens each running request may run: one for each that wants no more, the rest to
    the others in order.

    Args:
        running: oldest first.
        at_most: requests of the step; None: all.
        step_tokens: of the step.
        cap: of one prompt.
    """
    ready = dict(
        islice(((key, request) for key, request in running.items() if request.wanted), at_most)
    )
    counts = {key: 1 for key, request in ready.items() if request.wanted == 1}
    left = step_tokens - len(counts)
    for key, request in ready.items():
        if request.wanted > 1:
            counts[key] = min(request.wanted, left, cap)
            left = left_behind(request, counts[key], left)
    return counts


def left_behind(request: Request, count: int, left: int) -> int:
    """Of ``left`` tokens, what requests behind one may have that got ``count``: nothing, if it
    wants more, for it came first.
    """
    return left - count if count == request.wanted else 0


def left_for_newcomers(
    running: Mapping[RequestKey, Request], counts: Mapping[RequestKey, int], step_tokens: int
) -> int:
    """Tokens of a step that requests may have which do not run yet."""
    if any(count < running[key].wanted for key, count in counts.items()):
        return 0
    return step_tokens - sum(counts.values())
