"""What commands write, and a gateway that they ask."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_gateway import ScriptedGateway, scripted_gateway


@pytest.fixture
def out(capsys: pytest.CaptureFixture[str]) -> Callable[[], Any]:
    """Reads the one JSON document that was written."""

    def read() -> Any:
        captured = capsys.readouterr()
        assert captured.err == ""
        assert captured.out.count("\n") == 1
        return json.loads(captured.out)

    return read


@pytest.fixture
def far_gateway(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ScriptedGateway]:
    """One that the environment names: commands take it for another machine's."""
    with scripted_gateway() as server:
        monkeypatch.setenv("PILOTLIGHT_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("PILOTLIGHT_URL", server.url)
        monkeypatch.setenv("PILOTLIGHT_ADMIN_KEY", "admin")
        monkeypatch.setenv("PILOTLIGHT_API_KEY", "inference")
        yield server


@pytest.fixture
def near_gateway(
    far_gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[ScriptedGateway]:
    """One that this process announces on a state folder."""
    from pilotlight.cli.home import Home

    home = Home(tmp_path / "home")
    home.prepare()
    monkeypatch.delenv("PILOTLIGHT_URL")
    home.announce(far_gateway.url)
    yield far_gateway
    home.withdraw()
