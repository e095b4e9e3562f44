"""Whether an embedded nats-server can still write its streams.

A stream whose disk was full once refuses every write until the server is started again, also when there has been room for long.
"""

import os
from pathlib import Path
from typing import Any

import msgspec
import nats.errors
from nats.aio.client import Client

from pilotlight.common.natsconf import SYSTEM

DEADLINE_S = 2.0
ENOUGH_BYTES = 16 * 1024 * 1024
"""Room with which starting the server again is worth while."""
_HEALTH = "$SYS.REQ.SERVER.PING.HEALTHZ"


class _Ill(msgspec.Struct, frozen=True):
    error: str = ""


class _Health(msgspec.Struct, frozen=True):
    errors: tuple[_Ill, ...] = ()
    error: str = ""


class _Answer(msgspec.Struct, frozen=True):
    data: _Health


async def write_error(url: str, password: str) -> str | None:
    """Why a stream cannot be written; None when all can, or the server does not say."""
    client = Client()
    options: dict[str, Any] = {
        "servers": [url],
        "user": SYSTEM,
        "password": password,
        "allow_reconnect": False,
        "connect_timeout": 2,
        "error_cb": _ignore,
    }
    try:
        await client.connect(**options)
        try:
            reply = await client.request(_HEALTH, b'{"details": true}', timeout=DEADLINE_S)
        finally:
            await client.close()
        health = msgspec.json.decode(reply.data, type=_Answer).data
    except (nats.errors.Error, OSError, TimeoutError, msgspec.MsgspecError):
        return None
    told = [ill.error for ill in health.errors] or [health.error]
    return next((one for one in told if "write error" in one), None)


def has_room(folder: Path) -> bool:
    """Whether there is room again where the server writes."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize >= ENOUGH_BYTES


async def _ignore(_: Any) -> None:
    """What goes wrong is raised, too."""
