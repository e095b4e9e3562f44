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

END_TOKENS = 8
"""A stream with no more to come is about to end: those of a wave end that many steps apart."""
LONG_TOKENS = 32
"""As many had a stream that is waited for, at least: where answers are short, all are about to end
at any time."""
END_SHARE = 0.5
"""As much of a batch is about to end, at least: the others gain less than those that wait lose."""


def waits(limits: BatchLimits, waiting: Collection[Request], outlook: Outlook) -> bool:
    """Whether nothing is taken up now, for others or for a batch's end.

    Args:
        limits: of the batches.
        waiting: requests that own no blocks, oldest first.
        outlook: those that run, and what is promised of all.
    """
    return gathers(limits, len(outlook.running), waiting, outlook.now_s) or awaits_end(
        limits, waiting, outlook
    )


def awaits_end(limits: BatchLimits, waiting: Collection[Request], outlook: Outlook) -> bool:
    """Whether nothing is taken up before a batch has ended.

    1. Not where few requests run: there is little to be stretched.
    2. Not longer than ``ending_s`` from when the first of them came.
    3. Not for one that ran before, nor where one of them is long, as when they gather.
    4. At least ``END_SHARE`` of those that run have no more than ``END_TOKENS`` to come, by what
       they are allowed (a stop token may end others, and nobody knows), and had ``LONG_TOKENS``.
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
    ending = sum(map(_ends_soon, running))
    return ending >= END_SHARE * len(running) and outlook.spare_s(waiting) >= left_s  # 4, 5


def _ends_soon(stream: Request) -> bool:
    left = stream.left_tokens
    return left <= END_TOKENS and stream.position >= LONG_TOKENS and stream.wanted <= 1
