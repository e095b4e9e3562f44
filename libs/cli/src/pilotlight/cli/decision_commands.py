"""``pilotlight decision``, ``why`` and ``replay``."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from pilotlight.cli.options import Json, Name, admin_client


def show_decision(
    decision_id: Annotated[
        str, Parameter(help="As the events page, a log or an instance's row names it.")
    ],
    /,
    *,
    json: Json = False,
) -> int:
    """Show one decision of the scheduler: why these workers, why so many stages, how far off."""
    from pilotlight.cli import decisions

    with admin_client() as client:
        return decisions.show(client, decision_id, as_json=json)


def why(model: Name, /, *, json: Json = False) -> int:
    """Say what a model waits for now."""
    from pilotlight.cli import decisions

    with admin_client() as client:
        return decisions.why(client, model, as_json=json)


def replay(
    file: Annotated[Path, Parameter(help="A decision log: a file below state/decisions.")],
    /,
    *,
    json: Json = False,
) -> int:
    """Decide again what a scheduler decided: identical, or the first difference."""
    from pilotlight.cli import replay as replays

    return replays.show(file, as_json=json)
