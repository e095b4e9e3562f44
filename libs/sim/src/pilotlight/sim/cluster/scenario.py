"""What a simulation runs: nodes, models, arrivals, contenders, read from TOML.

``pilotlight/sim/scenarios`` has those that come with the package; ``paraserve-testbed-1.toml`` says
what each field is.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import resources
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from pilotlight.policy.coldstart.policies import StartPolicy
from pilotlight.policy.eviction.tiers import DEFAULT as DEFAULT_EVICTION

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

GIB = 1024**3
Made = TypeVar("Made", bound="DataclassInstance")
POPULAR: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"azure-functions": (0.186, 0.996), "model-market": (0.059, 0.9865)}
)
"""Of published laws: which share of the models has which share of the requests."""


class BadScenario(ValueError):
    """A scenario cannot be used; says where and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeKind:
    """Equal nodes."""

    name: str
    count: int
    devices: int
    device_gib: float
    memory_gib: float
    """Of the host, for copies of models."""
    network_gbit_per_s: float
    load_gib_per_s: float
    """From the host's memory to each device: PCIe."""
    memory_gib_per_s: float
    """What a device reads of its own memory."""
    disk_gib: float = 0.0
    """For what was brought to the node, beyond its host's memory; 0: there is no disk tier. For
    contenders whose host pools keep copies."""
    disk_gib_per_s: float = 0.0
    """What all reads of it get together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models of one size."""

    name: str
    size_gib: float
    layers: int
    hidden_size: int
    kv_heads: int
    head_dim: int = 128
    vocab_size: int = 32_000
    prefill_tokens_per_s: float
    decode_step_s: float
    """Of one request."""
    decode_more_s: float
    """For each further request of a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Application:
    """Models that serve one purpose: of one family, with one SLO and one kind of request."""

    name: str
    family: str
    models: int
    ttft_s: float
    tpot_s: float
    prompt_tokens: int
    """In mean; lengths are spread log-normally."""
    output_tokens: int
    spread: float = 0.6
    """Standard deviation of the logarithm of a length."""
    max_instances: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """When requests come, and for which models."""

    kind: str = "gamma"
    """``gamma``, ``poisson``, ``trace`` or ``burst``."""
    per_s: float = 0.6
    """Of all models together, in mean."""
    duration_s: float = 1800.0
    cv: float = 8.0
    """Coefficient of variation of each model's gaps, of ``gamma``."""
    zipf: float = 0.0
    """Exponent of the models' popularity; 0: all are equal."""
    popularity: str = ""
    """A published law, within whose head and tail ``zipf`` holds: ``azure-functions`` (18.6 % of
    the applications have 99.6 % of the calls: Shahrad et al., ATC 2020) or ``model-market`` (5.9 %
    of the models have 98.65 % of the requests: Aegaeon, SOSP 2025). Empty: ``zipf`` alone."""
    trace: str = ""
    """Of ``trace``: a file of Azure's (columns ``TIMESTAMP``, ``ContextTokens``,
    ``GeneratedTokens``) or of Mooncake's (lines of JSON); or ``conversations`` or ``code``, whose
    arrivals are within the package."""
    burst_factor: float = 5.0
    """Of ``burst``: how many times as many requests come within ``burst_s``."""
    burst_s: float = 2.0
    bursts: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUp:
    """What a worker takes beside its parameters, in seconds. All are 0 on a platform whose workers
    are up already.
    """

    create_s: float = 0.0
    context_s: float = 0.0
    libraries_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Something dies, and comes back empty."""

    kind: str
    """``worker``: its process, which its node notices at once; ``node``: all that runs there."""
    at_s: float
    for_s: float = 10.0
    """Until it is there again."""
    name: str = ""
    """Of the worker or node; empty: any, drawn from those that live."""
    every_s: float = 0.0
    """It happens again and again; 0: once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to run the cluster."""

    name: str
    start: StartPolicy | None
    """How a start is chosen; None: as control does without estimates."""
    max_stages: int = 1
    cache: bool = False
    """Host pools keep what was fetched."""
    peers: bool = False
    """Nodes give each other what they have."""
    created: bool = False
    """Processes are there before the start."""
    warm: bool = False
    """So are contexts and libraries."""
    overlapped: bool = True
    """Fetches run beside the rest of a start. Else they begin when the worker is up."""
    streamed: bool = True
    """Loads run beside fetches."""
    eviction: str = "lru"
    """What goes of devices for room; a name of ``eviction.choice``."""
    pool_eviction: str = ""
    """The same for host pools; empty: what was brought there the longest ago."""


CONTENDERS: Mapping[str, Contender] = MappingProxyType(
    {
        one.name: one
        for one in (
            Contender(name="single", start=StartPolicy.SINGLE, overlapped=False, streamed=False),
            Contender(
                name="locality",
                start=StartPolicy.LOCALITY,
                cache=True,
                created=True,
                overlapped=False,
            ),
            Contender(name="paraserve", start=StartPolicy.PARASERVE, max_stages=4),
            Contender(
                name="paraserve+cache", start=StartPolicy.PARASERVE, max_stages=4, cache=True
            ),
            Contender(
                name="pilotlight",
                start=StartPolicy.PILOTLIGHT,
                max_stages=4,
                cache=True,
                peers=True,
                created=True,
                warm=True,
            ),
            Contender(
                name="pilotlight-bare",
                start=StartPolicy.PILOTLIGHT,
                max_stages=4,
                cache=True,
                peers=True,
            ),
            Contender(
                name="pilotlight-evicts",
                start=StartPolicy.PILOTLIGHT,
                max_stages=4,
                cache=True,
                peers=True,
                created=True,
                warm=True,
                eviction=DEFAULT_EVICTION,
                pool_eviction=DEFAULT_EVICTION,
            ),
            Contender(
                name="least-ttft", start=None, cache=True, peers=True, created=True, warm=True
            ),
        )
    }
)
"""Those that a scenario can be run with. Names with ``+cache`` are the paper's "w/ cache";
``pilotlight-bare`` pays for its processes as the others do; ``pilotlight-evicts`` lets go of copies
on devices and in host pools as services do by default, the others of what was used the longest ago;
``least-ttft`` is what the scheduler does by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """All of it."""

    name: str
    nodes: tuple[NodeKind, ...]
    families: tuple[Family, ...]
    applications: tuple[Application, ...]
    arrivals: Arrivals = field(default_factory=Arrivals)
    start_up: StartUp = field(default_factory=StartUp)
    failures: tuple[Failure, ...] = ()
    keep_alive_s: float = 60.0
    max_batch: int = 8
    """Requests that an instance takes at once."""
    proportional_shares: bool = False
    """A worker's share of its device's computation is its share of the memory."""
    slo_scale: float = 1.0

    def family(self, name: str) -> Family:
        """One family by its name."""
        return next(one for one in self.families if one.name == name)


def builtin() -> tuple[str, ...]:
    """Scenarios that come with the package."""
    folder = resources.files("pilotlight.sim").joinpath("scenarios")
    names = (one.name for one in folder.iterdir())
    return tuple(sorted(name[: -len(".toml")] for name in names if name.endswith(".toml")))


def read_builtin(name: str) -> Scenario:
    """A scenario that comes with the package.

    Raises:
        BadScenario: there is none of that name.
    """
    if name not in builtin():
        raise BadScenario(f"there is no scenario {name!r}; there are {', '.join(builtin())}")
    file = resources.files("pilotlight.sim").joinpath("scenarios", f"{name}.toml")
    return parse(name, file.read_text("utf-8"))


def parse(name: str, text: str) -> Scenario:
    """A scenario from TOML.

    Raises:
        BadScenario: it is no TOML, has unknown or missing fields, or does not fit together.
    """
    try:
        read = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadScenario(f"{name}: {error}") from error
    rest = {key: value for key, value in read.items() if key not in _TABLES}
    made = _made(
        Scenario,
        f"{name}",
        {
            **rest,
            "name": name,
            "nodes": _listed(NodeKind, name, read, "nodes"),
            "families": _listed(Family, name, read, "families"),
            "applications": _listed(Application, name, read, "applications"),
            "failures": _listed(Failure, name, read, "failures"),
            "arrivals": _made(Arrivals, f"{name}: arrivals", read.get("arrivals", {})),
            "start_up": _made(StartUp, f"{name}: start_up", read.get("start_up", {})),
        },
    )
    families = {one.name for one in made.families}
    for one in made.applications:
        if one.family not in families:
            raise BadScenario(f"{name}: application {one.name} names no family: {one.family}")
    if not made.nodes or not made.applications:
        raise BadScenario(f"{name}: there must be nodes and applications")
    if made.arrivals.kind not in ("gamma", "poisson", "trace", "burst"):
        raise BadScenario(f"{name}: arrivals: there is no kind {made.arrivals.kind!r}")
    if made.arrivals.popularity not in ("", *POPULAR):
        raise BadScenario(
            f"{name}: arrivals: there is no law {made.arrivals.popularity!r} of popularity"
        )
    for one in made.failures:
        if one.kind not in ("worker", "node") or one.for_s <= 0 or one.every_s < 0:
            raise BadScenario(
                f"{name}: failures: a kind is worker or node, for_s is above 0, every_s at least 0"
            )
    if made.arrivals.per_s <= 0 or made.arrivals.duration_s <= 0 or made.arrivals.cv <= 0:
        raise BadScenario(f"{name}: arrivals: per_s, duration_s and cv must be above 0")
    return made


_TABLES = ("nodes", "families", "applications", "failures", "arrivals", "start_up")


def _listed(kind: type[Made], name: str, read: Mapping[str, Any], table: str) -> tuple[Made, ...]:
    tables: Sequence[Any] = read.get(table, ())
    return tuple(
        _made(kind, f"{name}: {table}, entry {at + 1}", one) for at, one in enumerate(tables)
    )


def _made(kind: type[Made], where: str, read: Mapping[str, Any]) -> Made:
    known = {one.name for one in fields(kind)}
    unknown = sorted(set(read) - known)
    if unknown:
        raise BadScenario(f"{where}: unknown fields: {', '.join(unknown)}")
    try:
        return kind(**read)
    except TypeError as error:
        raise BadScenario(f"{where}: {error}") from error
