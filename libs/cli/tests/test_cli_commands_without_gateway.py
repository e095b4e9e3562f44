"""The command line without a gateway: what is said where no system runs, JSON in every case, and
what is refused.
"""

import inspect
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App

from pilotlight.cli.client import AdminClient, SystemNotRunning
from pilotlight.cli.home import Home
from pilotlight.cli.main import app, run


def test_no_system_runs(tmp_path: Path) -> None:
    home = Home(tmp_path)
    with pytest.raises(SystemNotRunning, match="no system runs"):
        AdminClient.from_environment({}, home)
    with pytest.raises(SystemNotRunning, match=r"admin\.key"):
        AdminClient.from_environment({"PILOTLIGHT_URL": "http://127.0.0.1:1"}, home)


COMMANDS = [
    ["model", "list"],
    ["model", "add", "tiny", "file:///models/tiny"],
    ["model", "rm", "tiny"],
    ["model", "warm", "tiny"],
    ["trace", "0" * 32],
]


@pytest.mark.parametrize("command", COMMANDS)
def test_json_also_when_it_fails(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    out: Callable[[], Any],
) -> None:
    monkeypatch.setenv("PILOTLIGHT_HOME", str(tmp_path))
    monkeypatch.delenv("PILOTLIGHT_URL", raising=False)
    assert run([*command, "--json"]) == 1
    error = out()["error"]
    assert error["code"] == "system_not_running"
    assert "pilotlight up" in error["what_to_do"]
    assert run(command) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "system_not_running: no system runs" in captured.err


def test_other_commands_without_a_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: Callable[[], Any]
) -> None:
    monkeypatch.setenv("PILOTLIGHT_HOME", str(tmp_path))
    assert run(["down", "--json"]) == 0
    assert out() == {"stopped": False}
    assert run(["logs", "gateway", "--json"]) == 1
    assert out()["error"]["code"] == "log_not_found"
    assert run(["doctor", "--json", "--port", "1"]) in (0, 1)
    assert {"name", "verdict", "found", "what_to_do"} == set(out()["checks"][0])
    monkeypatch.setenv("PILOTLIGHT_HOME", "/proc/nowhere")
    assert run(["up", "--json", "--port", "1"]) == 1
    assert out()["error"]["code"] == "home_unusable"


@pytest.mark.parametrize(
    "command",
    [
        ["model", "add"],
        ["nonsense"],
        ["up", "--port", "70000"],
        ["up", "--port", "x"],
        ["up", "--workers", "many"],
        ["doctor", "--no"],
    ],
)
def test_a_wrong_command_line(
    command: list[str], capsys: pytest.CaptureFixture[str], out: Callable[[], Any]
) -> None:
    assert run([*command, "--json"]) == 1
    assert out()["error"]["code"] == "invalid_request"
    assert run(command) == 1
    captured = capsys.readouterr()
    assert "Error" in captured.out + captured.err


@pytest.mark.parametrize("port", ["x", "0", "-1", "70000", "8000.5", "²"])
def test_a_wrong_port_in_the_environment(
    port: str, monkeypatch: pytest.MonkeyPatch, out: Callable[[], Any]
) -> None:
    monkeypatch.setenv("PILOTLIGHT_PORT", port)
    assert run(["doctor", "--json"]) == 1
    assert "PILOTLIGHT_PORT" in out()["error"]["message"]


def test_doctor_looks_at_the_port_of_the_system_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: Callable[[], Any]
) -> None:
    monkeypatch.setenv("PILOTLIGHT_HOME", str(tmp_path))
    monkeypatch.delenv("PILOTLIGHT_PORT", raising=False)

    def port_looked_at(*arguments: str) -> str:
        run(["doctor", "--json", *arguments])
        (found,) = [one["found"] for one in out()["checks"] if one["name"] == "port"]
        return found

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        Home(tmp_path).announce(f"http://127.0.0.1:{port}")
        assert port_looked_at().startswith(f"{port} is in use by process")
        assert "127.0.0.1:1" in port_looked_at("--port", "1")
        monkeypatch.setenv("PILOTLIGHT_PORT", "1")
        assert "127.0.0.1:1" in port_looked_at()


def test_what_up_refuses_before_it_makes_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: Callable[[], Any]
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("PILOTLIGHT_HOME", str(home))

    def refused(*arguments: str) -> dict[str, str]:
        assert run(["up", "--json", *arguments]) == 1
        assert not home.exists()
        return out()["error"]

    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = str(listener.getsockname()[1])
        assert refused("--port", taken)["code"] == "port_taken"
        with monkeypatch.context() as without:
            without.setitem(sys.modules, "torch", None)
            told = refused("--port", taken)
            assert (told["code"], "torch" in told["message"]) == ("machine_unfit", True)
            assert "--worker-kind sim" in told["what_to_do"]
            assert refused("--port", taken, "--worker-kind", "sim")["code"] == "port_taken"
            assert run(["demo", "--json"]) == 1
            assert out()["error"] == told
            assert not home.exists()
        for name, value in (
            ("POOL_BYTES", "lots"),
            ("SIM_DECODE_STEP_S", "-1"),
            ("SPANS_KEEP_DAYS", "x"),
            ("EVENTS_BYTES", "y"),
        ):
            with monkeypatch.context() as wrong:
                wrong.setenv(f"PILOTLIGHT_{name}", value)
                told = refused("--port", taken)
                assert told["code"] == "settings_invalid"
                assert told["message"].startswith(f"PILOTLIGHT_{name}: ")
                assert told["message"].endswith(f", not {value!r}")


def test_a_port_that_is_taken_leaves_a_folder_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: Callable[[], Any]
) -> None:
    monkeypatch.setenv("PILOTLIGHT_HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert run(["up", "--json", "--port", str(listener.getsockname()[1])]) == 1
    assert out()["error"]["code"] == "port_taken"
    assert [path.name for path in tmp_path.iterdir()] == ["up.lock"]


def commands(app: App, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], App]]:
    """Every command with its words."""
    for name in app:
        if not name.startswith("-"):
            found = app[name]
            if found.default_command is not None:
                yield (*path, name), found
            yield from commands(found, (*path, name))


def test_every_command_speaks_json() -> None:
    found = dict(commands(app))
    assert len(found) > 40
    silent = [
        words
        for words, command in found.items()
        if "json" not in inspect.signature(command.default_command).parameters
    ]
    assert silent == []
    # What people of other tools look for.
    asked = (
        "run", "chat", "pull", "ps", "status", "model show", "model set", "model evict", "warm", "logs",
        "trace", "key create", "key list", "key revoke", "key rotate", "usage", "bench", "completion",
    )  # fmt: skip
    assert {tuple(words.split()) for words in asked} <= set(found)
