"""Whether requests that wait are to wait for a batch that is about to end.

Clients whose answers end together ask again together, but for a few: those whose answers were the
first to end are back while the others' last tokens are still to come. Taken up at once, few prompts
stretch the last gaps of many streams, and they are ahead of the others by so many tokens the next
time, too. A few steps later the batch has ended, and the prompts share a step with all that have
come meanwhile.
"""

from collections.abc import Collection

from pilotlight.engine.core.gathering import gathers
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.core.promises import Outlook
from pilotlight.engine.core.request import Request

LONG_TIMES = 4
"""As many times what is to come had a stream that is waited for: of short answers, too, no larger
part is spent so."""
END_SHARE = 0.5
"""As much of a batch is about to end, at least: the others gain less than those that wait lose."""


def waits(limits: BatchLimits, waiting: Collection[Request], outlook: Outlook) -> bool:
    """Whether nothing is taken up now, for others or for a batch's end.

    Args:
        limits: of the batches.
        waiting: requests that own no blocks, oldest first.
        outlook: those that run, and what is promised of all.
    """
    launches_s = outlook.promises.pace.launches_s
    return gathers(limits, len(outlook.running), waiting, outlook.now_s, launches_s) or awaits_end(
        limits, waiting, outlook
    )


def awaits_end(limits: BatchLimits, waiting: Collection[Request], outlook: Outlook) -> bool:
    """Whether nothing is taken up before a batch has ended.

    1. Not where few requests run: there is little to be stretched.
    2. Not longer than ``ending_s`` from when the first of them came.
    3. Not for one that ran before, nor where one of them is long, as when they gather.
    4. At least ``END_SHARE`` of those that run end before that, if they are given all the tokens
       that they are allowed (a stop token may end others, and nobody knows) at the pace of now, and
       have had ``LONG_TIMES`` as many.
    5. Not where a first token could be late by it.

    Args:
        limits: of the batches.
        waiting: requests that own no blocks, oldest first.
        outlook: those that run, and what is promised of all.
    """
    running = outlook.running
    if not waiting or len(running) <= limits.gather_running:  # 1
        return False
    first = next(iter(waiting))
    left_s = limits.ending_s - (outlook.now_s - first.queued_s)
    long = limits.chunk_tokens or limits.step_tokens
    if left_s <= 0 or first.takes or any(one.wanted >= long for one in waiting):  # 2, 3
        return False
    step_s = outlook.step_s
    if not step_s:
        return False
    ending = sum(_ends_within(one, left_s / step_s) for one in running)
    return ending >= END_SHARE * len(running) and outlook.spare_s(waiting) >= left_s  # 4, 5


def _ends_within(stream: Request, tokens: float) -> bool:
    left = stream.left_tokens
    return left <= tokens and LONG_TIMES * left <= stream.position and stream.wanted <= 1
