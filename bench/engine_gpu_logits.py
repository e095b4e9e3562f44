"""How far two engines' logits are from what a checkpoint means (``engine_gpu_emulated``), behind
the same tokens.

With weights in fp8, tokens say little. An activation that lies between two values of fp8 falls to
either side of it, by what an engine rounded before: rounding to bfloat16 is off by 0.17 % of normal
values' length, and behind fp8 by 1.3 %. So two engines that are both right are as far from each
other as from float32, and of a random model's tokens the best two are closer than that.
What can be asked is that ours is no further off than the other is: ``NO_WORSE``, as in
``libs/engine/tests/test_fp8.py``.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

NO_WORSE = 1.2
"""How many times further from float32 than the other engine we may be."""
PLACES = 3
"""Behind each prompt: its own end, which a prefill gives, and two steps of decode."""
FORCED_TOKEN = 11
"""What either engine has to say at each place, by a bias that nothing outweighs: their pasts are
then the same."""
FORCED_BIAS = 100.0

Logits = NDArray[np.float32]
"""[prompts, places, vocab_size]; logarithms of probabilities do as well."""


def judged(emulation: Logits, engines: Mapping[str, Logits]) -> dict[str, Any]:
    """What prompts' ends say, and the places behind them.

    Args:
        emulation: what is meant.
        engines: what ``ours`` and, where there is one, ``vllm`` gave.

    Returns:
        By ``prefill`` and ``decode``, for each engine: ``relative_error``, the distance of its
        logits from the emulation's, each less its mean, by their length, over all places (root of
        the mean square); ``kl_nats``, the mean divergence of its probabilities from the
        emulation's; ``same_best``, the share of places where both have the same best token. With
        two engines, ``between`` is the same of one beside the other, and ``errors`` names where
        ours is further off than it may be.
    """
    found: dict[str, Any] = {"places": list(emulation.shape[:2]), "errors": []}
    for kind, places in (("prefill", slice(0, 1)), ("decode", slice(1, None))):
        meant = emulation[:, places]
        if not meant.size:
            continue
        rows = {name: beside(meant, logits[:, places]) for name, logits in engines.items()}
        found[kind] = rows
        if "vllm" in engines:
            ours, theirs = (rows[name]["relative_error"] for name in ("ours", "vllm"))
            rows["between"] = beside(engines["vllm"][:, places], engines["ours"][:, places])
            if ours > NO_WORSE * theirs:
                found["errors"].append(
                    f"{kind}: logits are {ours} off, vLLM's {theirs}: above {NO_WORSE} times"
                )
    return found


def beside(meant: Logits, found: Logits) -> dict[str, float]:
    """One engine's figures; see ``judged``."""
    exact, given = (_centred(logits) for logits in (meant, found))
    errors = np.linalg.norm(given - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
    exact_log, given_log = (_log_probabilities(logits) for logits in (exact, given))
    divergence = (np.exp(exact_log) * (exact_log - given_log)).sum(axis=-1)
    same = exact.argmax(axis=-1) == given.argmax(axis=-1)
    return {
        "relative_error": round(float(np.sqrt((errors**2).mean())), 5),
        "kl_nats": round(float(divergence.mean()), 6),
        "same_best": round(float(same.mean()), 4),
    }


def _centred(logits: Logits) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    return wide - wide.mean(axis=-1, keepdims=True)


def _log_probabilities(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    least = logits - logits.max(axis=-1, keepdims=True)
    return least - np.log(np.exp(least).sum(axis=-1, keepdims=True))
