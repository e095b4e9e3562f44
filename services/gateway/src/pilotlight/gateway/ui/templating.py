"""Templates, and how they show numbers, times and ids."""

from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse

from pilotlight.common.clock import Clock
from pilotlight.gateway.ui.door import MOUNTED_AT

FOLDER = Path(__file__).parent
MISSING = "\N{EN DASH}"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Templates:
    """Renders pages and parts of pages."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._environment = Environment(
            loader=FileSystemLoader(FOLDER / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters.update(
            bytes=size, seconds=seconds, short=short, count=count, ago=self._ago
        )

    def render(self, request: Request, name: str, status: int = 200, **values: Any) -> HTMLResponse:
        """A page.

        Args:
            request: whose session the page is made for.
            name: the template's file.
            status: of HTTP.
            values: what the template shows.
        """
        session = getattr(request.state, "session", None)
        shared = {
            "ui": MOUNTED_AT,
            "path": request.url.path.removeprefix(MOUNTED_AT),
            "csrf_token": session.csrf_token if session is not None else "",
            "label": session.key.label if session is not None else "",
        }
        template = self._environment.get_template(name)
        return HTMLResponse(template.render(shared | values), status)

    def _ago(self, moment: datetime | str | None) -> str:
        if moment is None:
            return MISSING
        at = datetime.fromisoformat(moment) if isinstance(moment, str) else moment
        return f"{seconds(max(0.0, (self._clock.wall() - at).total_seconds()))} ago"


def size(value: float | None) -> str:
    """Bytes in binary units, with three digits."""
    if value is None:
        return MISSING
    unit = 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    digits = 0 if unit == 0 or value >= 100 else 1
    return f"{value:.{digits}f} {_UNITS[unit]}"


def seconds(value: float | None) -> str:
    """A duration in the unit that fits."""
    if value is None:
        return MISSING
    if value < 1:
        return f"{1000 * value:,.1f} ms" if value < 0.1 else f"{1000 * value:,.0f} ms"
    if value < 120:
        return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"
    if value < 7200:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.0f} h" if value < 172_800 else f"{value / 86_400:.0f} days"


def count(value: float | None) -> str:
    """A number with its thousands apart."""
    return MISSING if value is None else f"{value:,.0f}"


def short(identity: str) -> str:
    """The first characters of an id or digest: enough to tell a few apart."""
    prefix, dash, rest = identity.partition("-")
    if dash and len(rest) > 10:
        return f"{prefix}-{rest[:8]}"
    return identity if len(identity) <= 20 else identity[:12]
