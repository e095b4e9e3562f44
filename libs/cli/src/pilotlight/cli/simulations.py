"""What ``pilotlight simulate`` runs and prints."""

from dataclasses import dataclass, replace
from pathlib import Path

from pilotlight.cli.output import emit_json, show_table
from pilotlight.common.errors import UnprocessableInput
from pilotlight.policy.eviction.choice import POLICIES, make_policy
from pilotlight.sim.cache.run import CacheResult, simulate
from pilotlight.sim.cache.scenarios import DEFAULT, SCENARIOS
from pilotlight.sim.cache.workload import BadWorkload, Workload, read_catalogue, read_trace

DEFAULT_SHARE = 0.2
"""Of the catalogue: the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """What the command line says of a cache simulation."""

    scenario: str | None
    trace: Path | None
    catalogue: Path | None
    capacity_bytes: int | None
    compare: str | None
    seed: int


def run_cache(options: CacheOptions, *, as_json: bool) -> int:
    """Run each policy and print a line for it as soon as it is there; the exit status.

    Raises:
        UnprocessableInput: an unknown scenario or policy, or files that cannot be used.
    """
    names = _policies(options.compare)
    workload = _workload(options)
    capacity_bytes = options.capacity_bytes or int(DEFAULT_SHARE * workload.total_bytes)
    results: list[CacheResult] = []
    for name in names:
        result = simulate(make_policy(name, capacity_bytes), workload, capacity_bytes)
        results.append(result)
        if as_json:
            emit_json(_record(result, workload, capacity_bytes))
    if not as_json:
        rows = [
            (
                one.policy,
                f"{one.load_s_per_request:.4g}",
                f"{one.reload_s_per_request:.4g}",
                f"{one.hit_ratio:.4f}",
                f"{one.quantile_s(0.99):.4g}",
                str(one.reloads),
            )
            for one in sorted(results, key=lambda one: one.load_s)
        ]
        columns = ("policy", "load s/request", "reload s/request", "hits", "p99 load s", "reloads")
        show_table(columns, rows, empty="no policy")
    return 0


def _record(result: CacheResult, workload: Workload, capacity_bytes: int) -> dict[str, object]:
    return {
        "policy": result.policy,
        "load_s_per_request": result.load_s_per_request,
        "hit_ratio": result.hit_ratio,
        "p99_load_s": result.quantile_s(0.99),
        "reloads": result.reloads,
        "reload_s_per_request": result.reload_s_per_request,
        "first_loads": result.first_loads,
        "evictions": result.evictions,
        "requests": result.requests,
        "capacity_bytes": capacity_bytes,
        "workload": workload.name,
    }


def _policies(compare: str | None) -> list[str]:
    if compare is None:
        return list(POLICIES)
    names = list(dict.fromkeys(name.strip() for name in compare.split(",") if name.strip()))
    unknown = [name for name in names if name not in POLICIES]
    if unknown or not names:
        raise UnprocessableInput(
            f"unknown policies: {', '.join(unknown) or 'none named'}; there are {', '.join(POLICIES)}"
        )
    return names


def _workload(options: CacheOptions) -> Workload:
    name = options.scenario or DEFAULT
    if name not in SCENARIOS:
        raise UnprocessableInput(f"there is no scenario {name!r}; there are {', '.join(SCENARIOS)}")
    if options.trace is None:
        if options.catalogue is not None:
            raise UnprocessableInput("a catalogue of your own needs a trace of your own: --trace")
        return SCENARIOS[name](options.seed)
    try:
        if options.catalogue is None:
            generated = SCENARIOS[name](options.seed)
            requests = read_trace(_lines(options.trace), generated.catalogue)
            return replace(generated, name=options.trace.name, requests=requests, true_rates=())
        entries = read_catalogue(_lines(options.catalogue))
        requests = read_trace(_lines(options.trace), entries)
    except BadWorkload as error:
        raise UnprocessableInput(str(error)) from error
    return Workload(name=options.trace.name, catalogue=entries, requests=requests)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UnprocessableInput(f"{file} cannot be read: {error}") from error
