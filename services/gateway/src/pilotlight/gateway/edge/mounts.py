"""Applications below a prefix."""

import re

from starlette.applications import Starlette
from starlette.routing import Mount, Route
from starlette.types import ASGIApp


def mounted(path: str, app: ASGIApp) -> Mount:
    """All of a prefix is the application's, paths with line breaks in them, too.

    Starlette's own patterns end at a line break: such a path would be answered by whoever comes
    next, in another shape, or, where the break is its last character, as if it had none.
    """
    mount = Mount(path, app=app)
    mount.path_regex = re.compile(mount.path_regex.pattern, re.DOTALL)
    for route in app.routes if isinstance(app, Starlette) else ():
        if isinstance(route, Route):
            pattern = route.path_regex.pattern.removesuffix("$")
            route.path_regex = re.compile(rf"{pattern}\Z")
    return mount
