"""Whether requests that wait are to wait for others, so that they share their first step.

When the answers of a large batch end together, their clients ask again one after the other. Taken
up as they come, their prompts stretch one step after the other of all that run; taken up together,
they stretch one.

Where short ones come by chance, and many, a step that is nothing but its launches holds more of
them the longer it is waited for, at no cost. Where each step has some, an engine does a fifth less
than it can.
"""

from collections.abc import Collection

from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.core.pace import LEAST_PROMPT_TOKENS
from pilotlight.engine.core.request import Request

LAUNCHES_TIMES = 2
"""As many times what its launches take is a step waited for: while they go on, nobody is taken up,
and then as long again the streams go on without."""


def gathers(
    limits: BatchLimits,
    running: int,
    waiting: Collection[Request],
    now_s: float,
    launches_s: float = 0.0,
) -> bool:
    """Whether nothing is taken up now.

    1. Not where few requests run: there is little to be stretched.
    2. Not for a single one: most come alone, and nothing would come of its waiting.
    3. Not longer than ``gather_s`` from when the first of them came, or, as long as their prompts
       are so short that their step is its launches, than ``LAUNCHES_TIMES`` these.
    4. Not for one that ran before.
    5. Not when they fill a step, nor where one of them is long: its step is a long one anyway.

    Args:
        limits: of the batches.
        running: requests that own blocks.
        waiting: the others, oldest first.
        now_s: on the engine's clock.
        launches_s: of a step with prompts (``Pace.launches_s``).
    """
    if running <= limits.gather_running or len(waiting) < 2:  # 1, 2
        return False
    first = next(iter(waiting))
    wanted = [request.wanted for request in waiting]
    tokens, most_s = sum(wanted), limits.gather_s
    if tokens < LEAST_PROMPT_TOKENS:
        most_s = max(most_s, LAUNCHES_TIMES * launches_s)
    if now_s - first.queued_s >= most_s or first.takes:  # 3, 4
        return False
    long = limits.chunk_tokens or limits.step_tokens
    return max(wanted) < long and tokens < limits.step_tokens - running  # 5
