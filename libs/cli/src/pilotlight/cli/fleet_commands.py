"""``pilotlight ps``, ``status``, ``warm``, ``materialize``, ``trace``: what the system does."""

import os
from typing import Annotated

from cyclopts import Parameter, validators

from pilotlight.cli.options import Json, Name, admin_client, home_folder

WARM_TIMEOUT_S = 600.0


def ps(*, json: Json = False) -> int:
    """Show which models are loaded where, and how long nobody has asked them."""
    from pilotlight.cli import loaded

    with admin_client() as client:
        return loaded.show(client, as_json=json)


def status(*, json: Json = False) -> int:
    """Show services, nodes and models on one screen. Ends with 1 when a service is not ready."""
    from pilotlight.cli import overview

    with admin_client() as client:
        elsewhere = "PILOTLIGHT_URL" in os.environ
        return overview.show(client, home_folder(), elsewhere=elsewhere, as_json=json)


def warm(
    name: Name,
    /,
    *,
    wait: Annotated[
        bool, Parameter(help="Wait until it is ready.", negative="", show_default=False)
    ] = False,
    timeout_s: Annotated[
        float, Parameter(help="Seconds to wait at most.", validator=validators.Number(gt=0))
    ] = WARM_TIMEOUT_S,
    json: Json = False,
) -> int:
    """Load a model before a request asks for it."""
    from pilotlight.cli import models
    from pilotlight.common.clock import SystemClock

    with admin_client() as client:
        if not wait:
            return models.warm(client, name, as_json=json)
        from pilotlight.cli.warming import warm_and_wait

        return warm_and_wait(client, name, timeout_s, SystemClock(), as_json=json)


def materialize(
    name: Name,
    /,
    *,
    wait: Annotated[bool, Parameter(help="Wait until it is done.")] = True,
    timeout_s: Annotated[
        float, Parameter(help="Seconds to wait at most.", validator=validators.Number(gt=0))
    ] = WARM_TIMEOUT_S,
    json: Json = False,
) -> int:
    """Build what a model's starts then restore, once, on a worker with time."""
    from pilotlight.cli import materializing
    from pilotlight.common.clock import SystemClock

    with admin_client() as client:
        wait_s = timeout_s if wait else None
        return materializing.materialize(client, name, SystemClock(), wait_s, as_json=json)


def trace(
    request: Annotated[
        str,
        Parameter(
            help="The x-request-id header of an answer, or request_id in a log; or 32 hex digits: x-trace-id, or trace_id in a log."
        ),
    ],
    /,
    *,
    json: Json = False,
) -> int:
    """Show one request through every service, and the cold start that it caused as a waterfall."""
    from pilotlight.cli import traces

    with admin_client() as client:
        return traces.show(client, request, as_json=json)


def show_logs(
    service: Annotated[
        str | None, Parameter(help="One log, for example gateway; without it, all of them.")
    ] = None,
    /,
    *,
    lines: Annotated[
        int,
        Parameter(
            name=["--lines", "-n"],
            help="How many lines of each log, from its end.",
            validator=validators.Number(gte=0),
        ),
    ] = 50,
    follow: Annotated[
        bool,
        Parameter(
            name=["--follow", "-f"], help="Go on until Ctrl-C.", negative="", show_default=False
        ),
    ] = False,
    json: Json = False,
) -> int:
    """Show the end of the logs, each line as a sentence; --json has them as they were written."""
    from pilotlight.cli import logs

    return logs.show(home_folder(), service, lines, follow=follow, as_json=json)
