"""How often, and by how much, the policies of a start choose worse than the exact search.

Random clusters of up to 8 nodes; every policy chooses for the same request, and all choices are
predicted alike (``coldstart.servers.predict``). A choice that would make a running fetch late
counts as one that misses the SLO. Processor time of each choice beside it.

    python bench/start_choice.py --clusters 2000
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from pilotlight.policy.coldstart.policies import CHOICES, StartPolicy
from pilotlight.policy.coldstart.servers import StartRules, StartScheme
from pilotlight.policy.coldstart.testing import random_start


@dataclass
class Tally:
    """One policy's choices beside the best ones."""

    worse: int = 0
    """In the order (SLO met, s, device bytes, TTFT)."""
    missed: int = 0
    """The SLO, where the best choice meets it."""
    late: int = 0
    """Choices that make a running fetch late."""
    nothing: int = 0
    """No choice where there is one."""
    bytes_over: list[float] = field(default_factory=list[float])
    """Device bytes over the best choice's, where both meet the SLO."""
    ttft_over: list[float] = field(default_factory=list[float])
    """Predicted TTFT over the best choice's, where neither meets the SLO."""
    choice_ms: list[float] = field(default_factory=list[float])

    def add(self, found: StartScheme | None, best: StartScheme) -> None:
        """Compare."""
        if found is None:
            self.nothing += 1
            self.missed += best.meets_slo
            self.worse += 1
            return
        good = found.meets_slo and not found.refusal
        self.late += bool(found.refusal)
        self.missed += best.meets_slo and not good
        self.worse += bool(found.refusal) or found.order > best.order
        if good and best.meets_slo:
            self.bytes_over.append(found.device_bytes / best.device_bytes)
        elif not found.meets_slo and not best.meets_slo:
            self.ttft_over.append(found.ttft_s / best.ttft_s)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one JSON object for each policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clusters", type=int, default=2000)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args(arguments)
    rng, rules = random.Random(asked.seed), StartRules()
    tallies = {policy: Tally() for policy in StartPolicy}
    possible = met = 0
    for _ in range(asked.clusters):
        request, servers = random_start(rng, nodes=rng.randint(2, asked.nodes), peers=asked.peers)
        chosen: dict[StartPolicy, StartScheme | None] = {}
        for policy, choose in CHOICES.items():
            began_s = time.process_time()
            chosen[policy] = choose(request, servers, rules)
            tallies[policy].choice_ms.append(1000 * (time.process_time() - began_s))
        best = chosen[StartPolicy.PILOTLIGHT]
        if best is None:
            continue
        possible += 1
        met += best.meets_slo
        for policy, found in chosen.items():
            tallies[policy].add(found, best)
    for policy, tally in tallies.items():
        ordered = sorted(tally.choice_ms)
        print(
            json.dumps(
                {
                    "policy": policy.value,
                    "clusters": possible,
                    "slo_can_be_met": met,
                    "worse": round(tally.worse / possible, 4),
                    "slo_missed": round(tally.missed / max(1, met), 4),
                    "makes_others_late": round(tally.late / possible, 4),
                    "no_choice": round(tally.nothing / possible, 4),
                    "device_bytes_over": round(_mean(tally.bytes_over), 3),
                    "ttft_over": round(_mean(tally.ttft_over), 3),
                    "choice_ms_p50": round(ordered[len(ordered) // 2], 3),
                    "choice_ms_p99": round(ordered[int(0.99 * len(ordered))], 3),
                }
            )
        )


def _mean(ratios: Sequence[float]) -> float:
    return statistics.fmean(ratios) if ratios else 1.0


if __name__ == "__main__":
    main()
