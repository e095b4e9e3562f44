"""Figures of a load test: what clients saw, as percentiles. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

SHARES = ((50, 0.5), (90, 0.9), (95, 0.95), (99, 0.99))
MAX_ERRORS = 5


@dataclass(kw_only=True)
class Sample:
    """One request; times in seconds since the first was due."""

    planned_s: float | None = None
    """When it was to be sent; None: as soon as another had ended."""
    sent_s: float = 0.0
    first_s: float | None = None
    """The first text came."""
    last_s: float = 0.0
    """The last text came."""
    gaps_s: list[float] = field(default_factory=list[float])
    """Between texts that follow each other."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    """Both as the server counted."""
    cold: bool = False
    error: str = ""

    def text(self, at_s: float) -> None:
        """A text came."""
        if self.first_s is None:
            self.first_s = at_s
        else:
            self.gaps_s.append(at_s - self.last_s)
        self.last_s = at_s

    @property
    def ttft_s(self) -> float | None:
        """From the request to its first text."""
        return None if self.first_s is None else self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token after the first; None where there is no second."""
        if self.first_s is None or self.output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.output_tokens - 1)


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of sorted values, between the two nearest ones; 0 of none."""
    if not ordered:
        return 0.0
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def figures(samples: Sequence[Sample]) -> dict[str, Any]:
    """Throughput, and times in milliseconds: ``ttft`` to the first text, ``tpot`` a token after it,
    ``itl`` between texts, ``e2el`` to the end.
    """
    whole = [sample for sample in samples if not sample.error]
    ended_s = max((sample.last_s for sample in whole), default=0.0)
    took_s = ended_s - min((sample.sent_s for sample in whole), default=0.0)
    prompt_tokens = sum(sample.prompt_tokens for sample in whole)
    output_tokens = sum(sample.output_tokens for sample in whole)

    def per_s(count: int) -> float:
        return round(count / took_s, 3) if took_s > 0 else 0.0

    times = {
        "ttft": [value for sample in whole if (value := sample.ttft_s) is not None],
        "tpot": [value for sample in whole if (value := sample.tpot_s) is not None],
        "itl": [gap_s for sample in whole for gap_s in sample.gaps_s],
        "e2el": [sample.last_s - sample.sent_s for sample in whole],
    }
    late = sorted(s.sent_s - s.planned_s for s in samples if s.planned_s is not None)
    errors = list(dict.fromkeys(sample.error for sample in samples if sample.error))
    return {
        "requests": len(samples),
        "failed": len(samples) - len(whole),
        "cold": sum(sample.cold for sample in whole),
        "took_s": round(took_s, 3),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "requests_per_s": per_s(len(whole)),
        "output_tokens_per_s": per_s(output_tokens),
        "tokens_per_s": per_s(prompt_tokens + output_tokens),
        **{f"{name}_ms": _spread_ms(values) for name, values in times.items()},
        "sent_late_ms_p99": round(percentile(late, 0.99) * 1000, 3),
        "errors": errors[:MAX_ERRORS],
    }


def _spread_ms(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    mean = sum(ordered) / len(ordered) if ordered else 0.0
    told = {"mean": mean, **{f"p{name}": percentile(ordered, share) for name, share in SHARES}}
    return {name: round(value * 1000, 3) for name, value in told.items()}
