"""``pilotlight node``: list nodes, and empty them."""

from typing import Annotated

from cyclopts import App, Parameter

from pilotlight.cli.options import Json, admin_client
from pilotlight.common.errors import UnprocessableInput

node_app = App(name="node", help="List nodes, and empty them.")


@node_app.command(name="list")
def node_list(*, json: Json = False) -> int:
    """List nodes, their state, and what is on them."""
    from pilotlight.cli import nodes

    with admin_client() as client:
        return nodes.show(client, as_json=json)


@node_app.command(name="drain")
def node_drain(
    node: Annotated[str, Parameter(help="A name that `pilotlight node list` shows.")],
    /,
    *,
    undo: Annotated[
        bool, Parameter(help="Use the node again.", negative="", show_default=False)
    ] = False,
    wait: Annotated[
        bool, Parameter(help="Return when nothing is left on it.", negative="", show_default=False)
    ] = False,
    timeout_s: Annotated[
        float, Parameter(help="With --wait: give up waiting after so long; it goes on draining.")
    ] = 600.0,
    json: Json = False,
) -> int:
    """Empty a node: nothing new is placed on it, requests there end, its models are started
    elsewhere where there is room.
    """
    from pilotlight.cli import nodes

    if undo and wait:
        raise UnprocessableInput("--undo waits for nothing: leave --wait out")
    with admin_client() as client:
        if undo:
            return nodes.undrain(client, node, as_json=json)
        return nodes.drain(client, node, wait_s=timeout_s if wait else None, as_json=json)
