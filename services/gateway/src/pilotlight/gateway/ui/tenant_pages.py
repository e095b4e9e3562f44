"""Pages of tenants: API keys, and what was used."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from pilotlight.common.clock import Clock
from pilotlight.common.errors import UnprocessableInput
from pilotlight.gateway.records.usage_report import DAYS, DayUsage, UsageReader
from pilotlight.gateway.tenants.keys import BOOTSTRAP_LABEL, KeyRepository
from pilotlight.gateway.tenants.projects import ProjectRepository
from pilotlight.gateway.ui.templating import Templates
from pilotlight.policy.access import AdminNeed, may_administer

ROWS_SHOWN = 500
"""More make a page slow; the CSV has all."""
_WORD = re.compile(r"[A-Za-z0-9._/-]{0,200}")
_WORDS = ("project", "key_id", "model")
_SUMMED = (
    "requests",
    "failed",
    "prompt_tokens",
    "output_tokens",
    "device_s",
    "start_device_s",
    "idle_device_s",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantPageParts:
    """What these pages read."""

    keys: KeyRepository
    projects: ProjectRepository
    usage: UsageReader


class TenantPages:
    """The handlers of these pages."""

    def __init__(self, parts: TenantPageParts, templates: Templates, clock: Clock) -> None:
        self._parts = parts
        self._render = templates.render
        self._clock = clock

    async def keys(self, request: Request) -> Response:
        """Keys, but for the keys themselves; owners make and end them here."""
        revoked = request.query_params.get("revoked") == "true"
        role = request.state.session.key.admin_role
        projects = await self._parts.projects.projects()
        return self._render(
            request,
            "keys.html",
            keys=await self._parts.keys.shown(None, revoked=revoked),
            revoked=revoked,
            now=self._clock.wall().isoformat(),
            projects=[project["name"] for project in projects],
            owner=may_administer(role, AdminNeed.OWN),
            from_file=BOOTSTRAP_LABEL,
        )

    async def usage(self, request: Request) -> Response:
        """What was used, by day, key and model."""
        query = request.query_params
        today = self._clock.wall().astimezone(UTC).date()
        wanted = {name: query.get(name, "").strip() for name in _WORDS} | {
            "from": query.get("from", "").strip() or str(today - timedelta(days=DAYS)),
            "to": query.get("to", "").strip() or str(today),
        }
        rows: list[DayUsage] = []
        csv = failure = ""
        try:
            asked = _asked(wanted)
            rows = await self._parts.usage.by_day(**asked)
            csv = "/admin/v1/usage?" + _query(asked)
        except UnprocessableInput as error:
            failure = error.message
        projects = await self._parts.projects.projects()
        return self._render(
            request,
            "usage.html",
            rows=rows[: -ROWS_SHOWN - 1 : -1],
            all_rows=len(rows),
            sums=_sums(rows),
            wanted=wanted,
            csv=csv,
            failure=failure,
            projects=[project["name"] for project in projects],
        )


def _asked(wanted: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of ``UsageReader.by_day``; the last day is asked for whole.

    Raises:
        UnprocessableInput: this is no filter.
    """
    for name in _WORDS:
        if _WORD.fullmatch(wanted[name]) is None:
            raise UnprocessableInput(f"this is no {name}: {wanted[name][:100]!r}", param=name)
    since, last = (_day(wanted[name]) for name in ("from", "to"))
    if last < since:
        raise UnprocessableInput("the last day is before the first")
    words = {name: wanted[name] or None for name in _WORDS}
    return {"since": _midnight(since), "until": _midnight(last) + timedelta(days=1), **words}


def _day(text: str) -> date:
    try:
        found = date.fromisoformat(text)
    except ValueError as error:
        raise UnprocessableInput(f"{text[:20]!r} is no day") from error
    if not 1970 <= found.year <= 9000:
        raise UnprocessableInput(f"{text[:20]!r} is no day of ours")
    return found


def _midnight(day: date) -> datetime:
    return datetime.combine(day, time(), UTC)


def _query(asked: Mapping[str, Any]) -> str:
    told = {
        name: value.isoformat() if isinstance(value, datetime) else value
        for name, value in asked.items()
        if value is not None
    }
    return urlencode({**told, "format": "csv"})


def _sums(rows: Sequence[DayUsage]) -> dict[str, float]:
    return {name: sum(getattr(row, name) for row in rows) for name in _SUMMED}
