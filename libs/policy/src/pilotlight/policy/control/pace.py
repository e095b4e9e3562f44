"""How many starts a tick begins: as many as fit into its time, by what the last one took.

What a tick looks at whatever it begins is shared by more starts, and no tick keeps commands, rows
and the lease waiting for long. What is shared is little: a start alone costs a tick 4.5 ms, one of
eight 3.1, at 1,000 nodes.
"""

AIM_S = 0.008
"""Ticks that are shorter may begin more, ..."""
LIMIT_S = 0.012
"""... and those that are longer begin fewer: the slowest of a hundred takes twice as long."""
MOST = 32
LEAST = 4
"""However slow the machine is: each turn has its own rows and its own look at what waits."""


def next_starts(most: int, begun: int, tick_s: float, least: int) -> int:
    """How many starts the next tick begins at most.

    Args:
        most: The same of the tick before.
        begun: Starts that it began; none say nothing.
        tick_s: What it took, in seconds.
        least: So many in any case: a machine that is slow is not made slower.
    """
    if begun and tick_s > LIMIT_S:
        most -= max(1, most // 4)
    elif begun >= most and tick_s < AIM_S:
        most += max(1, most // 4)
    return min(max(most, least), max(least, MOST))
