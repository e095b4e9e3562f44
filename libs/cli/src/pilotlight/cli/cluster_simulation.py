"""What ``pilotlight simulate SCENARIO`` runs and prints."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.progress import Progress

from pilotlight.cli.output import emit_json, errors, show_table
from pilotlight.common.errors import UnprocessableInput
from pilotlight.sim.cluster.report import report
from pilotlight.sim.cluster.results import Result
from pilotlight.sim.cluster.run import Simulation
from pilotlight.sim.cluster.scenario import (
    CONTENDERS,
    BadScenario,
    Contender,
    Scenario,
    parse,
    read_builtin,
)

USUAL = ("single", "locality", "paraserve", "pilotlight")
"""Compared unless others are named: the paper's, and ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """What the command line says of a simulation."""

    scenario: str
    compare: str | None
    seed: int
    report: Path | None
    duration_s: float | None
    per_s: float | None
    cv: float | None
    slo_scale: float | None


def run_cluster(options: ClusterOptions, *, as_json: bool) -> int:
    """Run each contender and print a line for it as soon as it is there; the exit status.

    Raises:
        UnprocessableInput: an unknown scenario or contender, or files that cannot be used.
    """
    try:
        scenario = _scenario(options)
        contenders = _contenders(options.compare)
        results: list[Result] = []
        for contender in contenders:
            with _progress(contender.name) as progress:
                results.append(Simulation(scenario, contender, options.seed, progress).run())
            if as_json:
                emit_json({**record(results[-1]), "ttft_quantiles_s": results[-1].ttft_quantiles_s})
    except BadScenario as error:
        raise UnprocessableInput(str(error)) from error
    if options.report is not None:
        try:
            options.report.write_text(report(scenario, results, options.seed), encoding="utf-8")
        except OSError as error:
            raise UnprocessableInput(f"the report cannot be written: {error}") from error
    if not as_json:
        show_table(_COLUMNS, [_row(one) for one in results], empty="no policy")
    return 0


def record(result: Result) -> dict[str, object]:
    """One result as a line of JSON, without single times and what depends on the machine."""
    return {
        "policy": result.policy,
        "ttft_attainment": result.ttft_attainment,
        "tpot_attainment": result.tpot_attainment,
        "ttft_p50_s": result.ttft_p50_s,
        "ttft_p99_s": result.ttft_p99_s,
        "device_seconds": result.device_seconds,
        "requests": result.requests,
        "finished": result.finished,
        "starts": result.starts,
        "stages": result.stages,
        "refusals": result.refusals,
        "deaths": result.deaths,
        "scenario": result.scenario,
        "applications": {
            one.name: {
                "requests": one.requests,
                "ttft_attainment": one.ttft_attainment,
                "tpot_attainment": one.tpot_attainment,
            }
            for one in result.applications
        },
    }


_COLUMNS = (
    "policy",
    "TTFT attained",
    "TPOT attained",
    "TTFT p50 s",
    "TTFT p99 s",
    "device s",
    "starts",
    "requests",
)


def _row(one: Result) -> Sequence[str]:
    return (
        one.policy,
        f"{one.ttft_attainment:.4f}",
        f"{one.tpot_attainment:.4f}",
        f"{one.ttft_p50_s:.3f}",
        f"{one.ttft_p99_s:.3f}",
        f"{one.device_seconds:.0f}",
        str(one.starts),
        str(one.requests),
    )


def _scenario(options: ClusterOptions) -> Scenario:
    name = options.scenario
    if name.endswith(".toml"):
        file = Path(name)
        try:
            scenario = parse(file.stem, file.read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise UnprocessableInput(f"{file} cannot be read: {error}") from error
    else:
        scenario = read_builtin(name)
    arrivals = scenario.arrivals
    arrivals = replace(
        arrivals,
        duration_s=arrivals.duration_s if options.duration_s is None else options.duration_s,
        per_s=arrivals.per_s if options.per_s is None else options.per_s,
        cv=arrivals.cv if options.cv is None else options.cv,
    )
    slo_scale = scenario.slo_scale if options.slo_scale is None else options.slo_scale
    return replace(scenario, arrivals=arrivals, slo_scale=slo_scale)


def _contenders(compare: str | None) -> list[Contender]:
    names = USUAL if compare is None else [one.strip() for one in compare.split(",")]
    unknown = [name for name in names if name not in CONTENDERS]
    if unknown or not names:
        raise UnprocessableInput(
            f"unknown policies: {', '.join(unknown)}; there are {', '.join(CONTENDERS)}"
        )
    return [CONTENDERS[name] for name in names]


@contextmanager
def _progress(name: str) -> Generator[Callable[[float], None]]:
    """A bar on a terminal's standard error; elsewhere nothing."""
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task(name, total=1.0)
        yield lambda share: bar.update(task, completed=share)
