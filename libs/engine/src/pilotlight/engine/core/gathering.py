"""Whether requests that wait are to wait for others, so that they share their first step.

When the answers of a large batch end together, their clients ask again one after the other. Taken
up as they come, their prompts stretch one step after the other of all that run; taken up together,
they stretch one.
"""

from collections.abc import Collection

from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.core.request import Request


def gathers(limits: BatchLimits, running: int, waiting: Collection[Request], now_s: float) -> bool:
    """Whether nothing is taken up now.

    1. Not where few requests run: there is little to be stretched.
    2. Not for a single one: most come alone, and nothing would come of its waiting.
    3. Not longer than ``gather_s`` from when the first of them came.
    4. Not for one that ran before.
    5. Not when they fill a step, nor where one of them is long: its step is a long one anyway.

    Args:
        limits: of the batches.
        running: requests that own blocks.
        waiting: the others, oldest first.
        now_s: on the engine's clock.
    """
    if running <= limits.gather_running or len(waiting) < 2:  # 1, 2
        return False
    first = next(iter(waiting))
    if now_s - first.queued_s >= limits.gather_s or first.takes:  # 3, 4
        return False
    long = limits.chunk_tokens or limits.step_tokens
    wanted = [request.wanted for request in waiting]
    return max(wanted) < long and sum(wanted) < limits.step_tokens - running  # 5
