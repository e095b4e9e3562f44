"""What came of the requests of one run."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from pilotlight.sim.cluster.build import Catalogue
from pilotlight.sim.cluster.engine import Request
from pilotlight.sim.cluster.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class AppResult:
    """One application's share."""

    name: str
    requests: int
    """That ended."""
    ttft_attainment: float
    tpot_attainment: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one contender made of one scenario."""

    scenario: str
    policy: str
    requests: int
    finished: int
    ttft_attainment: float
    """Share of all requests whose first token came within its SLO; one that never came did not."""
    tpot_attainment: float
    """Share of the requests that ended whose tokens came at the pace of their SLO."""
    ttft_p50_s: float
    ttft_p99_s: float
    device_seconds: float
    """In which devices were held, by the share of their memory."""
    starts: int
    stages: int
    refusals: int
    deaths: int
    """Of workers and nodes."""
    ticks: int
    simulated_s: float
    cpu_s: float
    applications: tuple[AppResult, ...]
    ttfts_s: Sequence[float]
    """Ascending, without those that never came."""

    @property
    def ttft_quantiles_s(self) -> tuple[float | None, ...]:
        """What each per cent of all requests, 1 to 100, did not exceed; None where too few had a
        token.
        """
        found = [_quantile(self.ttfts_s, share / 100, self.requests) for share in range(1, 101)]
        return tuple(None if math.isinf(one) else one for one in found)


@dataclass(slots=True)
class _Of:
    """Counts of one application."""

    first: int = 0
    ended: int = 0
    in_time: int = 0
    in_pace: int = 0


@dataclass(slots=True)
class Tally:
    """Counts while a run goes on."""

    scenario: Scenario
    catalogue: Catalogue
    finished: int = 0
    _apps: dict[str, _Of] = field(default_factory=dict[str, _Of])
    _ttfts: "array[float]" = field(default_factory=lambda: array("d"))

    def __post_init__(self) -> None:
        self._apps = {one.name: _Of() for one in self.scenario.applications}

    def first(self, request: Request) -> None:
        """A request has its first token."""
        ttft_s = request.ttft_s
        self._ttfts.append(ttft_s)
        app = self._apps[self.catalogue.applications[request.model].name]
        app.first += 1
        app.in_time += ttft_s * 1000 <= self.catalogue.models[request.model].slo.ttft_ms

    def ended(self, request: Request) -> None:
        """A request has all its tokens."""
        self.finished += 1
        app = self._apps[self.catalogue.applications[request.model].name]
        app.ended += 1
        app.in_pace += request.tpot_s * 1000 <= self.catalogue.models[request.model].slo.tpot_ms

    def result(
        self,
        *,
        policy: str,
        requests: int,
        simulated_s: float,
        device_seconds: float,
        starts: int,
        stages: int,
        refusals: int,
        deaths: int,
        ticks: int,
        cpu_s: float,
    ) -> Result:
        """What it came to.

        Args:
            policy: The contender's name.
            requests: That came.
            simulated_s: How long the cluster ran.
            device_seconds: In which devices were held.
            starts: Instances that were started.
            stages: Of all of them.
            refusals: Starts that nothing came of.
            deaths: Of workers and nodes.
            ticks: How often control looked.
            cpu_s: Processor time of the run.
        """
        ttfts = sorted(self._ttfts)
        ended = sum(one.ended for one in self._apps.values())
        return Result(
            scenario=self.scenario.name,
            policy=policy,
            requests=requests,
            finished=self.finished,
            ttft_attainment=_share(sum(one.in_time for one in self._apps.values()), requests),
            tpot_attainment=_share(sum(one.in_pace for one in self._apps.values()), ended),
            ttft_p50_s=_quantile(ttfts, 0.5, requests),
            ttft_p99_s=_quantile(ttfts, 0.99, requests),
            device_seconds=device_seconds,
            starts=starts,
            stages=stages,
            refusals=refusals,
            deaths=deaths,
            ticks=ticks,
            simulated_s=simulated_s,
            cpu_s=cpu_s,
            applications=tuple(
                AppResult(
                    name=name,
                    requests=one.ended,
                    ttft_attainment=_share(one.in_time, one.first),
                    tpot_attainment=_share(one.in_pace, one.ended),
                )
                for name, one in self._apps.items()
            ),
            ttfts_s=ttfts,
        )


def _share(count: int, of: int) -> float:
    return count / of if of else 1.0


def _quantile(values: Sequence[float], share: float, of: int) -> float:
    """What a share of all requests does not exceed; infinite where too few had a token."""
    place = math.ceil(share * of) - 1
    if of == 0:
        return 0.0
    return values[max(0, place)] if place < len(values) else math.inf
