"""How many starts a tick begins: as many as fit into its time, by what the last one took.

What a tick looks at whatever it begins is shared by more starts, and no tick keeps commands, rows
and the lease waiting for long. Time is the processor's: what else runs on the machine makes no tick
begin fewer.
"""

AIM_S = 0.006
"""Ticks that are shorter may begin more, ..."""
LIMIT_S = 0.009
"""... and those that are longer begin fewer: the slowest of a hundred takes twice as long."""
MOST = 32
LEAST = 1
"""However slow the processor is. A start may take as long as a tick is to: where one is that dear,
a second makes the slowest ticks longer than commands, and what nodes report, can wait."""


def next_starts(most: int, begun: int, tick_s: float, least: int) -> int:
    """How many starts the next tick begins at most.

    Args:
        most: The same of the tick before.
        begun: Starts that it began; none say nothing.
        tick_s: What it took of the processor, in seconds.
        least: So many in any case: a machine that is slow is not made slower.
    """
    if begun and tick_s > LIMIT_S:
        most -= max(1, most // 4)
    elif begun >= most and tick_s < AIM_S:
        most += max(1, most // 4)
    return min(max(most, least), max(least, MOST))
