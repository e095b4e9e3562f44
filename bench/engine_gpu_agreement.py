"""Do two engines with the same weights say the same? In bfloat16 they round differently, and where two tokens are almost equally probable
either may come first.
"""

from typing import Any

GAP_BOUND = 0.16
"""The most that the logits of two tokens may differ where engines disagree: five steps of bfloat16 between 4 and 8, where the best
logits of these models lie. Each engine's logits are off by about one by their own rounding, and by about one more from the layers'."""


def agreement(ours: list[list[int]], tops: list[list[list[list[float]]]], theirs: list[list[int]]) -> dict[str, Any]:
    """Compares greedy tokens up to the first that differs: what follows has another past.

    Args:
        ours: our tokens, of each prompt.
        tops: for each of them, the most probable ones, best first: [id, logarithm of the probability]. The difference of two logarithms
            is that of the logits.
        theirs: the other engine's tokens.

    Returns:
        Tokens that are equal, of how many; for each prompt whose tokens differ, where, our gap between the two best and to their token;
        and those that are more than rounding.
    """
    differing: list[dict[str, Any]] = []
    same = 0
    for prompt, (mine, yours) in enumerate(zip(ours, theirs, strict=True)):
        place = next((at for at, (one, other) in enumerate(zip(mine, yours, strict=True)) if one != other), None)
        same += len(mine) if place is None else place
        if place is None:
            continue
        best = tops[prompt][place]
        known = {int(token): value for token, value in best}
        to_theirs = round(best[0][1] - known[yours[place]], 4) if yours[place] in known else None
        differing.append(
            {
                "prompt": prompt,
                "token": place,
                "top_2_gap": round(best[0][1] - best[1][1], 4),
                "gap_to_theirs": to_theirs,
            }
        )
    errors = [one for one in differing if one["gap_to_theirs"] is None or one["gap_to_theirs"] > GAP_BOUND]
    compared = sum(map(len, ours)) - sum(len(ours[one["prompt"]]) - one["token"] - 1 for one in differing)
    return {
        "equal_tokens": same,
        "compared_tokens": compared,
        "prompts": len(ours),
        "equal_prompts": len(ours) - len(differing),
        "gap_bound": GAP_BOUND,
        "differing": differing,
        "errors": errors,
    }
