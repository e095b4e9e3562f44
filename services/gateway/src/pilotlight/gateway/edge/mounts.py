"""Applications below a prefix."""

import re

from starlette.routing import Mount
from starlette.types import ASGIApp


def mounted(path: str, app: ASGIApp) -> Mount:
    """All of a prefix is the application's, paths with line breaks in them, too.

    Starlette's own pattern ends at a line break: such a path would be answered by whoever comes
    next, in another shape.
    """
    mount = Mount(path, app=app)
    mount.path_regex = re.compile(mount.path_regex.pattern, re.DOTALL)
    return mount
