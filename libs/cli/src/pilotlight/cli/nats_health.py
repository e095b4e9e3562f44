"""Whether an embedded nats-server can still write its streams.

A stream whose disk was full once stores nothing until the server is started again, also when there
has been room for long. The server names each such stream; whether it takes anything at all shows
when something is written.
"""

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import nats.errors
import nats.js.errors
from nats.aio.client import Client

from pilotlight.common.buckets import HEALTH, jetstream
from pilotlight.common.natsconf import ADMIN, SYSTEM

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
    """Why a stream cannot be written; None when all can, or the server cannot be asked."""
    return await _write_error_told(url, password) or await _write_error_met(url, password)


async def _write_error_told(url: str, password: str) -> str | None:
    """Of any stream, as the server knows it."""
    try:
        async with _connection(url, SYSTEM, password) as client:
            reply = await client.request(_HEALTH, b'{"details": true}', timeout=DEADLINE_S)
        health = msgspec.json.decode(reply.data, type=_Answer).data
    except (nats.errors.Error, OSError, TimeoutError, msgspec.MsgspecError):
        return None
    told = [ill.error for ill in health.errors] or [health.error]
    return next((one for one in told if "write error" in one), None)


async def _write_error_met(url: str, password: str) -> str | None:
    """Of one write that is refused."""
    try:
        async with _connection(url, ADMIN, password) as client:
            try:
                await jetstream(client).publish(
                    f"$KV.{HEALTH}.{ADMIN}", b"null", timeout=DEADLINE_S
                )
            except nats.js.errors.Error as error:
                # Not one that takes long: a busy server must not be started again for it, and a
                # stream that is broken is told of.
                return str(error) or repr(error)
    except (nats.errors.Error, OSError, TimeoutError):
        return None
    return None


@asynccontextmanager
async def _connection(url: str, user: str, password: str) -> AsyncGenerator[Client]:
    client = Client()
    options: dict[str, Any] = {
        "servers": [url],
        "user": user,
        "password": password,
        "allow_reconnect": False,
        "connect_timeout": 2,
        "error_cb": _ignore,
    }
    await client.connect(**options)
    try:
        yield client
    finally:
        await client.close()


def has_room(folder: Path) -> bool:
    """Whether there is room again where the server writes."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize >= ENOUGH_BYTES


async def _ignore(_: Any) -> None:
    """What goes wrong is raised, too."""
