"""Do two engines with the same weights say the same? In bfloat16 they round differently, and where
two tokens are almost equally probable either may come first.

What is almost equal is measured: the same weights run in float32, too, behind the same tokens. How
far the gap between an engine's best token and the next ones is from float32's, where both engines
say the same, is that engine's rounding. Where they part, float32 has to find the two tokens as
close together as the other engine rounds: our own rounding, if it were too large, would excuse
itself.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

DEVIATIONS = 5.0
"""How many times the other engine's rounding (root mean square) may lie between two tokens of which
each engine takes another."""
CHECKED_TOKENS = 24
"""How many positions of each prompt's output run in float32 at most, the first that differs among
them."""

Tops = Sequence[Sequence[float]]
"""The most probable tokens at one place, best first: [id, logarithm of the probability]. The
difference of two is that of the logits."""


def first_difference(mine: Sequence[int], yours: Sequence[int]) -> int | None:
    """Where two outputs part."""
    return next(
        (at for at, (one, other) in enumerate(zip(mine, yours, strict=True)) if one != other), None
    )


def checked(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> list[list[int]]:
    """Positions of each prompt's output that are to run in float32: the last ones up to the first
    difference.
    """
    parted = (first_difference(mine, yours) for mine, yours in zip(ours, theirs, strict=True))
    ends = [len(mine) if at is None else at + 1 for mine, at in zip(ours, parted, strict=True)]
    return [list(range(max(0, end - CHECKED_TOKENS), end)) for end in ends]


def agreement(
    ours: Sequence[Sequence[int]],
    theirs: Sequence[Sequence[int]],
    our_tops: Sequence[Sequence[Tops]],
    their_tops: Sequence[Sequence[Tops]],
    exact: Sequence[Mapping[int, Tops]],
) -> dict[str, Any]:
    """Compares greedy tokens up to the first that differs: what follows has another past.

    Args:
        ours: our tokens, of each prompt.
        theirs: the other engine's.
        our_tops: the most probable ones at each of ours.
        their_tops: and at each of theirs.
        exact: of each prompt, the most probable ones in float32 at the positions that ``checked``
            names.

    Returns:
        Tokens that are equal, of how many; both roundings and the bound (None: no place tells); for
        each prompt whose tokens differ, where, our gap between the two best, and float32's from our
        token to theirs (negative: float32 prefers theirs); and those that are more than rounding.
    """
    places = [first_difference(mine, yours) for mine, yours in zip(ours, theirs, strict=True)]
    rounding = {
        name: root_mean_square(
            shift
            for prompt, (place, known) in enumerate(zip(places, tops, strict=True))
            for at, there in exact[prompt].items()
            if at != place
            for shift in shifts(known[at], there)
        )
        for name, tops in (("ours", our_tops), ("theirs", their_tops))
    }
    bound = None if rounding["theirs"] is None else DEVIATIONS * rounding["theirs"]
    differing: list[dict[str, Any]] = []
    for prompt, place in enumerate(places):
        if place is None:
            continue
        best, values = (
            our_tops[prompt][place],
            {int(token): value for token, value in exact[prompt][place]},
        )
        mine, yours = values.get(ours[prompt][place]), values.get(theirs[prompt][place])
        differing.append(
            {
                "prompt": prompt,
                "token": place,
                "top_2_gap": round(best[0][1] - best[1][1], 4),
                "float32_gap": None if mine is None or yours is None else round(mine - yours, 4),
            }
        )
    ends = [len(mine) if place is None else place for mine, place in zip(ours, places, strict=True)]
    return {
        "equal_tokens": sum(ends),
        "compared_tokens": sum(ends) + len(differing),
        "prompts": len(ours),
        "equal_prompts": len(ours) - len(differing),
        "rounding": {name: _rounded(value) for name, value in rounding.items()},
        "gap_bound": _rounded(bound),
        "float32_prefers_ours": sum((one["float32_gap"] or 0) > 0 for one in differing),
        "float32_prefers_theirs": sum((one["float32_gap"] or 0) < 0 for one in differing),
        "differing": differing,
        "errors": [
            one
            for one in differing
            if one["float32_gap"] is None or bound is None or abs(one["float32_gap"]) > bound
        ],
    }


def root_mean_square(values: Iterable[float]) -> float | None:
    """None of nothing: where no place was said by both, or none of one's best tokens is among the
    other's, nothing is known of a rounding, and it is not 0.
    """
    squares = [value * value for value in values]
    return math.sqrt(sum(squares) / len(squares)) if squares else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def shifts(rounded: Tops, exact: Tops) -> list[float]:
    """How far the gaps between an engine's best token and the next ones are from float32's."""
    values = {int(token): value for token, value in exact}
    (first, at_first), *others = rounded
    if int(first) not in values:
        return []
    best = values[int(first)]
    return [
        (at_first - value) - (best - values[int(token)])
        for token, value in others
        if int(token) in values
    ]
