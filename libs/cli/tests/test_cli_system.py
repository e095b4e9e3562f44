"""The servers of an embedded system while it starts."""

from pathlib import Path
from typing import Any

import pytest

from pilotlight.cli import system as system_module
from pilotlight.cli.home import Home
from pilotlight.cli.plan import SystemOptions
from pilotlight.cli.system import System

pytestmark = pytest.mark.anyio

LOOK_S = 0.01
"""So often it is looked whether streams can be written: many times while tables are made."""


async def test_nats_is_left_alone_until_there_are_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine takes longer for its tables than two looks are apart: what is written then reaches
    no stream, and starting the server again would break what makes them.
    """
    looks: list[str | None] = []
    before: list[int] = []
    look, migrate = system_module.write_error, system_module.migrate

    async def seen(url: str, password: str) -> str | None:
        looks.append(await look(url, password))
        return looks[-1]

    def migrated(*args: Any) -> None:
        migrate(*args)
        before.append(len(looks))

    monkeypatch.setattr(system_module, "LOOK_AT_NATS_S", LOOK_S)
    monkeypatch.setattr(system_module, "write_error", seen)
    monkeypatch.setattr(system_module, "migrate", migrated)
    for name in ("PILOTLIGHT_NATS_URL", "PILOTLIGHT_DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    home = Home(tmp_path / "home")
    home.prepare()
    system = System(home, SystemOptions(), lambda _: None)
    try:
        await system._start_servers()
        assert before == [0]
    finally:
        await system.stop()
    assert {*looks} <= {None}
