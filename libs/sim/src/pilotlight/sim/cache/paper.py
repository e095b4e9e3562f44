"""The workloads of mCache, section 6.1: seven models, four ways to give them services.

The paper says neither sizes nor load times of its seven models, and its trace is not shipped with
it. Here both are stated as ours:

- *Sizes* are of checkpoints in fp32, parameters times 4 bytes. Parameters are counted: those of
  the models of Transformers 5.23 with the published configurations, made without memory (on the
  device ``meta``): BERT, RoBERTa, XLNet, GPT-2 (small, large) and T5 (base, large), and ResNet-50
  (25,557,032, as torchvision says of its own). SSD300 with VGG-16 has 35,641,826 (torchvision,
  ``models/detection/ssd.py``, ``num_params``). Which variant the paper served it does not say: the
  base set has the smaller of each. Both span the paper's "hundreds of MB to several GB".
- *Load times* are 1.2 s and the size over 130 MB/s: ours, nothing is published. The paper reads its
  models from an NFS server with hard disks; the means of its Table 3 (1.68 to 8.20 s) lie in the
  range that follows. In the flat set they hardly depend on the size.
- *Services* have rates from a log-normal law through two published points of the Azure Functions
  trace (Shahrad et al., 2020, arXiv 2003.03423, section 3.3: 45 % of applications are invoked at
  most once an hour, 81 % at most once a minute), without the top tenth, over one hour, sampled down
  to 2,389 requests in all. The two shares are an assumption until somebody compares them with that
  paper's text, which was not at hand; what they change is how far the popularities of services
  spread, and under ``random`` and ``round-robin`` that is evened out over 105 services to a model.
"""

import math
import random
from dataclasses import dataclass
from enum import StrEnum

from pilotlight.policy.ids import ModelName
from pilotlight.sim.cache.workload import CatalogueEntry, TimedRequest, Workload, draw

REQUESTS = 2389
HOUR_S = 3600.0
SERVICES = 815
"""So many give 15,900 requests in an hour; 15 % of them are 2,389."""
LOG_MEAN = -7.675
LOG_SIGMA = 4.08
"""Of the natural logarithm of a service's requests a second: the law's distribution function is
0.45 at 1/3600 and 0.81 at 1/60."""
REMOVED_QUANTILE = 0.9

_PARAMETERS_M: dict[str, dict[str, float]] = {
    "large": {
        "resnet50": 25.6,
        "ssd300": 35.6,
        "bert": 335.1,
        "roberta": 355.4,
        "xlnet": 360.3,
        "gpt2": 774.0,
        "t5": 737.7,
    },
    "base": {
        "resnet50": 25.6,
        "ssd300": 35.6,
        "bert": 109.5,
        "roberta": 124.6,
        "xlnet": 116.7,
        "gpt2": 124.4,
        "t5": 222.9,
    },
}
SIZE_SETS = ("large", "base", "flat")
_START_S = 1.2
_DISK_BYTES_PER_S = 130e6
_FLAT_START_S = 6.0
_FLAT_BYTES_PER_S = 1e9


class Pairing(StrEnum):
    """How services get a model (section 6.1)."""

    RANDOM = "random"
    ROUND_ROBIN = "round-robin"
    """Services in any order; models by falling load time, in turn."""
    QUANTILE = "quantile"
    """Popular services get models that load slowly."""
    QUANTILE_R = "quantile-r"
    """Popular services get models that load fast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Popularity that changes: after each period the models change places."""

    period_s: float


def catalogue(size_set: str = "large") -> dict[ModelName, CatalogueEntry]:
    """The seven models: sizes and load times of one of ``SIZE_SETS``."""
    flat = size_set == "flat"
    start_s, bytes_per_s = (
        (_FLAT_START_S, _FLAT_BYTES_PER_S) if flat else (_START_S, _DISK_BYTES_PER_S)
    )
    entries: dict[ModelName, CatalogueEntry] = {}
    for name, parameters_m in _PARAMETERS_M["large" if flat else size_set].items():
        size_bytes = int(parameters_m * 4e6)
        entries[ModelName(name)] = CatalogueEntry(
            model=ModelName(name), size_bytes=size_bytes, load_s=start_s + size_bytes / bytes_per_s
        )
    return entries


def paper_workload(
    pairing: Pairing, seed: int, size_set: str = "large", drift: Drift | None = None
) -> Workload:
    """One hour of 2,389 requests.

    Args:
        pairing: Which service gets which model.
        seed: Of services, pairing and requests.
        size_set: Whose sizes and load times, one of ``SIZE_SETS``.
        drift: None: popularity stays as it is.
    """
    rng = random.Random(f"{pairing}/{seed}")
    entries = catalogue(size_set)
    weights = _pair(_services(rng), entries, pairing, rng)
    period_s = HOUR_S if drift is None else drift.period_s
    times = sorted(rng.uniform(0.0, HOUR_S) for _ in range(REQUESTS))
    phases: list[tuple[float, dict[ModelName, float]]] = []
    requests: list[TimedRequest] = []
    for number in range(math.ceil(HOUR_S / period_s)):
        if number:
            shuffled = list(weights.values())
            rng.shuffle(shuffled)
            weights = dict(zip(weights, shuffled, strict=True))
        began_s, end_s = number * period_s, (number + 1) * period_s
        here = [time_s for time_s in times if began_s <= time_s < end_s]
        total = sum(weights.values())
        rate_per_s = REQUESTS / HOUR_S / total
        phases.append((began_s, {one: weight * rate_per_s for one, weight in weights.items()}))
        requests += [
            TimedRequest(*each) for each in zip(here, draw(weights, len(here), rng), strict=True)
        ]
    suffix = "" if drift is None else f", drift {drift.period_s:g} s"
    return Workload(
        name=f"paper {size_set} {pairing}{suffix}",
        catalogue=entries,
        requests=requests,
        true_rates=phases,
    )


def _services(rng: random.Random) -> list[float]:
    """Rates of services, ascending, without the top tenth."""
    drawn = sorted(rng.lognormvariate(LOG_MEAN, LOG_SIGMA) for _ in range(SERVICES))
    return drawn[: int(REMOVED_QUANTILE * SERVICES)]


def _pair(
    services: list[float],
    entries: dict[ModelName, CatalogueEntry],
    pairing: Pairing,
    rng: random.Random,
) -> dict[ModelName, float]:
    """The sum of its services' rates for each model."""
    by_load = sorted(entries.values(), key=lambda one: one.load_s, reverse=True)
    weights = {one.model: 0.0 for one in by_load}
    if pairing is Pairing.ROUND_ROBIN:
        services = rng.sample(services, len(services))
    count = len(by_load)
    for number, rate in enumerate(services):
        if pairing is Pairing.RANDOM:
            place = rng.randrange(count)
        elif pairing is Pairing.ROUND_ROBIN:
            place = number % count
        elif pairing is Pairing.QUANTILE:
            place = count - 1 - number * count // len(services)
        else:
            place = number * count // len(services)
        weights[by_load[place].model] += rate
    return weights
