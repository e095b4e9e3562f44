"""``pilotlight simulate``: what policies would do, on this machine alone."""

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter, validators

from pilotlight.cli.options import Json

simulate_app = App(
    name="simulate", help="Simulate what policies would do; nothing needs to be running."
)


Above0 = validators.Number(gt=0)


@simulate_app.default
def simulate_cluster(
    scenario: Annotated[
        str,
        Parameter(
            help="paraserve-testbed-1, paraserve-testbed-2, sixty-four, thousand-nodes, or a file of TOML."
        ),
    ],
    /,
    *,
    compare: Annotated[
        str | None,
        Parameter(
            help="By default single,locality,paraserve,pilotlight; others: paraserve+cache, pilotlight-bare, pilotlight-evicts, least-ttft."
        ),
    ] = None,
    seed: Annotated[int, Parameter(help="Of the requests.")] = 1,
    duration_s: Annotated[
        float | None, Parameter(help="In the place of the scenario's.", validator=Above0)
    ] = None,
    per_s: Annotated[
        float | None,
        Parameter(help="Requests a second, in the place of the scenario's.", validator=Above0),
    ] = None,
    cv: Annotated[
        float | None,
        Parameter(
            help="Coefficient of variation of Gamma arrivals, in the place of the scenario's.",
            validator=Above0,
        ),
    ] = None,
    slo_scale: Annotated[
        float | None,
        Parameter(help="Multiplies all SLOs, in the place of the scenario's.", validator=Above0),
    ] = None,
    report: Annotated[
        Path | None, Parameter(help="Write a page with plots here: one HTML file.")
    ] = None,
    json: Json = False,
) -> int:
    """Run a cluster in simulated time under the scheduler's own control, with several policies.

    Equal seeds give equal requests, and equal results.
    """
    from pilotlight.cli import cluster_simulation

    options = cluster_simulation.ClusterOptions(
        scenario=scenario,
        compare=compare,
        seed=seed,
        report=report,
        duration_s=duration_s,
        per_s=per_s,
        cv=cv,
        slo_scale=slo_scale,
    )
    return cluster_simulation.run_cluster(options, as_json=json)


@simulate_app.command(name="cache")
def simulate_cache(
    scenario: Annotated[
        str | None,
        Parameter(
            help="A workload: modern (the default), modern-drift, modern-sessions, paper-..."
        ),
    ] = None,
    /,
    *,
    trace: Annotated[
        Path | None, Parameter(help="Requests of your own: CSV with the columns time_s, model.")
    ] = None,
    catalogue: Annotated[
        Path | None,
        Parameter(help="Models of your own: CSV with the columns model, size_bytes, load_s."),
    ] = None,
    capacity_bytes: Annotated[
        int | None,
        Parameter(
            help="Of the cache; by default 20 % of the catalogue.",
            validator=validators.Number(gte=1),
            show_default=False,
        ),
    ] = None,
    compare: Annotated[
        str | None, Parameter(help="Policies, for example lru,gdsf,iam,pilotlight; by default all.")
    ] = None,
    seed: Annotated[int, Parameter(help="Of a generated workload.")] = 5,
    json: Json = False,
) -> int:
    """Compare eviction policies: seconds of loads for each request, hits, reloads.

    A trace of your own needs a catalogue of your own, or the names of the scenario's models.
    """
    from pilotlight.cli import simulations

    options = simulations.CacheOptions(
        scenario=scenario,
        trace=trace,
        catalogue=catalogue,
        capacity_bytes=capacity_bytes,
        compare=compare,
        seed=seed,
    )
    return simulations.run_cache(options, as_json=json)
