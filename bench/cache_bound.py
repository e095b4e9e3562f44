"""A lower bound on the load seconds of any policy: an interval flow program with compulsory
residence, solved by HiGHS.

Between two requests for one model its copy stays or does not: x in [0, 1], and staying saves the
load of the second. Request t is served by a resident copy, so what stays across it must fit
beside that:

    y_t = y_(t-1) + S(m_(t-1)) x(opened at t-1) - S(m_t) x(closed at t),   0 <= y_t <= C - S(m_t)
    maximise  sum of P x

y_t are the bytes that stay across request t, without the model that it is for. With x in {0, 1}
this is the optimum for whole copies; fractions make it a bound. An interval that could not be kept
as a whole, because some request within it needs too much room, is closed (x = 0).
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import highspy
import numpy as np

from pilotlight.policy.ids import ModelName
from pilotlight.sim.cache.workload import CatalogueEntry, TimedRequest

MAX_REQUESTS = 22_000
_MIB = 1 << 20
"""Bytes are counted in this unit: the program's figures stay near each other."""


def least_reload_s(
    requests: Sequence[TimedRequest],
    catalogue: Mapping[ModelName, CatalogueEntry],
    capacity_bytes: int,
) -> float:
    """Seconds of loads, without first loads, that no policy without bypass can stay below.

    Args:
        requests: In order of time, at most ``MAX_REQUESTS``.
        catalogue: Sizes and load times.
        capacity_bytes: Of the cache.

    Raises:
        ValueError: too many requests.
        RuntimeError: HiGHS found no optimum.
    """
    if len(requests) > MAX_REQUESTS:
        raise ValueError(f"{len(requests)} requests, the program takes {MAX_REQUESTS}")
    fitting = [one for one in requests if catalogue[one.model].size_bytes <= capacity_bytes]
    beside_s = _reloads_beside(requests, catalogue, capacity_bytes)
    merged = _without_repeats(fitting)
    count = len(merged)
    sizes = np.array([catalogue[one].size_bytes / _MIB for one in merged])
    room = capacity_bytes / _MIB - sizes
    opened: dict[ModelName, int] = {}
    intervals: list[tuple[int, int]] = []
    for place, model in enumerate(merged):
        if model in opened:
            intervals.append((opened[model], place))
        opened[model] = place
    saved = np.array([catalogue[merged[end]].load_s for _, end in intervals])
    if not intervals:
        return beside_s
    least_room = _RangeMinimum(room)
    upper = [
        1.0 if sizes[end] <= least_room.of(begin + 1, end) else 0.0 for begin, end in intervals
    ]
    return beside_s + float(saved.sum()) - _most_saved(intervals, saved, upper, sizes, room, count)


def _most_saved(
    intervals: Sequence[tuple[int, int]],
    saved: np.ndarray,
    upper: Sequence[float],
    sizes: np.ndarray,
    room: np.ndarray,
    count: int,
) -> float:
    """Solve the program. Columns: x of each interval, then y of each request; a row a request.

    Args:
        intervals: Places of the two requests.
        saved: Seconds, for each interval.
        upper: Of x.
        sizes: Of the model of each request.
        room: Beside it.
        count: Requests.
    """
    opens = {begin: number for number, (begin, _) in enumerate(intervals)}
    closes = {end: number for number, (_, end) in enumerate(intervals)}
    first_y = len(intervals)
    starts, index, value = [0], list[int](), list[float]()
    for place in range(count):
        index.append(first_y + place)
        value.append(1.0)
        if place:
            index.append(first_y + place - 1)
            value.append(-1.0)
            if place - 1 in opens:
                index.append(opens[place - 1])
                value.append(-float(sizes[place - 1]))
        if place in closes:
            index.append(closes[place])
            value.append(float(sizes[place]))
        starts.append(len(index))
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = first_y + count, count
    lp.col_cost_ = np.concatenate([-saved, np.zeros(count)])
    lp.col_lower_ = np.zeros(first_y + count)
    lp.col_upper_ = np.concatenate([np.array(upper), np.maximum(room, 0.0)])
    lp.row_lower_ = lp.row_upper_ = np.zeros(count)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.array(starts, dtype=np.int32)
    lp.a_matrix_.index_ = np.array(index, dtype=np.int32)
    lp.a_matrix_.value_ = np.array(value)
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.passModel(lp)
    solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        raise RuntimeError(f"no optimum: {solver.modelStatusToString(solver.getModelStatus())}")
    return -float(solver.getInfo().objective_function_value)


def _reloads_beside(
    requests: Sequence[TimedRequest],
    catalogue: Mapping[ModelName, CatalogueEntry],
    capacity_bytes: int,
) -> float:
    """Of models that are larger than the cache: loaded for each request, the first apart."""
    counts = Counter(one.model for one in requests)
    return sum(
        (count - 1) * catalogue[model].load_s
        for model, count in counts.items()
        if catalogue[model].size_bytes > capacity_bytes
    )


def _without_repeats(requests: Sequence[TimedRequest]) -> list[ModelName]:
    """Models in turn; a request right after one for the same model finds it there."""
    merged: list[ModelName] = []
    for request in requests:
        if not merged or merged[-1] != request.model:
            merged.append(request.model)
    return merged


class _RangeMinimum:
    """Least values of ranges, by a table of ranges of powers of two."""

    def __init__(self, values: np.ndarray) -> None:
        self._levels = [values]
        width = 1
        while 2 * width <= len(values):
            before = self._levels[-1]
            self._levels.append(np.minimum(before[:-width], before[width:]))
            width *= 2

    def of(self, begin: int, end: int) -> float:
        """Over [begin, end); infinite where that is empty."""
        if begin >= end:
            return float("inf")
        level = (end - begin).bit_length() - 1
        values = self._levels[level]
        return float(min(values[begin], values[end - (1 << level)]))
