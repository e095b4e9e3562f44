"""What the commands show: checks of the machine, traces, logs, plans of processes."""

import io
import json
import os
import py_compile
import socket
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pilotlight.cli import logs, traces
from pilotlight.cli.client import AdminClient
from pilotlight.cli.doctor import (
    Verdict,
    check_bytecode,
    check_memory,
    check_port,
    check_room,
    examine,
)
from pilotlight.cli.home import Home, HomeInUse
from pilotlight.cli.output import show_table
from pilotlight.cli.plan import (
    SERVICES,
    Endpoints,
    SystemOptions,
    child_specs,
    default_gateways,
)
from pilotlight.cli.system import System
from pilotlight.common.errors import BadRequest, NotFound

ENDPOINTS = Endpoints(
    nats_url="nats://n", database_url="postgresql:///d", object_store_url="file:///o"
)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path / "home")
    made.prepare()
    return made


def test_every_check_says_what_to_do(home: Home) -> None:
    checks = examine(home, "127.0.0.1", 1)
    assert {
        "state folder",
        "settings",
        "port",
        "shared memory",
        "shared memory to work with",
        "file limit",
        "disk",
        "disk to work with",
        "memory",
        "engine",
        "GPUs",
        "bytecode",
        "compiler",
        "native code",
        "driver",
    } == {check.name for check in checks}
    for check in checks:
        assert check.found
        assert check.verdict is Verdict.OK or check.what_to_do, check


def test_the_state_folder(tmp_path: Path) -> None:
    there = {
        check.name: check
        for check in examine(Home(tmp_path / "not" / "there" / "yet"), "127.0.0.1", 1)
    }
    assert there["state folder"].verdict is Verdict.OK
    assert there["disk"].verdict is Verdict.OK
    check = next(
        check
        for check in examine(Home(Path("/proc/nowhere")), "127.0.0.1", 1)
        if check.name == "state folder"
    )
    assert check.verdict is Verdict.FAILED
    assert "PILOTLIGHT_HOME" in check.what_to_do


def test_the_port(home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        check = check_port(home, "127.0.0.1", port)
        assert (check.verdict, "PILOTLIGHT_PORT" in check.what_to_do) == (Verdict.FAILED, True)
        home.announce(f"http://127.0.0.1:{port}")
        check = check_port(home, "127.0.0.1", port)
        assert check.verdict is Verdict.OK
        assert f"process {os.getpid()}" in check.found
    home.withdraw()
    assert check_port(home, "127.0.0.1", port).verdict is Verdict.OK
    assert check_port(home, "203.0.113.7", port).verdict is Verdict.FAILED


def test_the_limits(tmp_path: Path) -> None:
    assert check_room("disk", tmp_path / "none", 1).verdict is Verdict.OK
    assert check_room("disk", tmp_path, 2**62).verdict is Verdict.WARNING
    meminfo = tmp_path / "meminfo"
    for text, verdict in (
        ("MemTotal: 1 kB\nMemAvailable: 9000000 kB\n", Verdict.OK),
        ("MemAvailable: 9000 kB\n", Verdict.WARNING),
        ("MemTotal: 1 kB\n", Verdict.WARNING),
    ):
        meminfo.write_text(text)
        assert check_memory(meminfo).verdict is verdict
    assert check_memory(tmp_path / "none").verdict is Verdict.WARNING


def test_libraries_without_bytecode_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "heavy.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    told = check_bytecode("heavy")
    assert told.verdict is Verdict.WARNING
    assert str(tmp_path) in told.what_to_do
    py_compile.compile(str(tmp_path / "heavy.py"))
    assert check_bytecode("heavy").verdict is Verdict.OK
    assert check_bytecode("there_is_no_such_package").verdict is Verdict.OK


# waterfall and trace


def test_a_trace_shows_each_span_once_and_failures_in_red(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def span(number: int, parent: int | None, name: str, status: str = "ok") -> dict[str, Any]:
        return {
            "span_id": str(number), "parent_id": str(parent or ""), "name": name, "service": "gateway", "status": status,
            "start_at": f"2026-01-01T00:00:0{number}+00:00", "end_at": f"2026-01-01T00:00:0{number + 1}+00:00",
        }  # fmt: skip

    class Trace:
        def get(self, path: str) -> dict[str, Any]:
            assert path == f"/traces/{'0a' * 16}"
            spans = [
                span(2, 1, "POST [/v1]"),
                span(1, None, "root"),
                span(3, 2, "lost", "worker_lost"),
                span(4, 99, "late"),
            ]
            return {"spans": spans, "cold_starts": []}

    client: Any = Trace()
    for wrong in ("00", "0A" * 16, "a/b", "0" * 33):
        with pytest.raises(BadRequest, match="32 hex digits"):
            traces.show(client, wrong, as_json=False)
    assert traces.show(client, "0a" * 16, as_json=False) == 0
    text = capsys.readouterr().out
    assert [text.count(name) for name in ("root", "POST [/v1]", "lost", "late")] == [1, 1, 1, 1]
    tree = traces._tree([span(1, None, "root"), span(3, 1, "lost", "worker_lost")], 80)
    assert [row.style for row in tree.rows] == [None, "red"]


def test_a_narrow_trace_cuts_names_and_no_numbers() -> None:
    spans = [
        {
            "span_id": str(number), "parent_id": str(number - 1), "name": "a name of a span, as long as some are",
            "service": "materializer", "status": "ok",
            "start_at": "2026-01-01T00:00:00+00:00", "end_at": "2026-01-01T00:08:53.123400+00:00",
        }
        for number in range(1, 5)
    ]  # fmt: skip
    out = io.StringIO()
    Console(file=out, width=80).print(traces._tree(spans, 80))
    lines = out.getvalue().splitlines()
    assert len(lines) == 1 + len(spans)
    assert all("533,123.4" in line and "materializer" in line for line in lines[1:])
    assert lines[0].endswith("533,123 ms")
    assert max(map(len, lines)) <= 80


# logs


def test_the_end_of_each_log(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    (home.logs / "gateway.log").write_text("".join(f"line {number}\n" for number in range(5)))
    (home.logs / "cache.log").write_bytes(b"[/odd] \xff [bold]\nlast, unfinished")
    assert logs.show(home, None, 2, follow=False, as_json=True) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"service": "cache", "line": "[/odd] \N{REPLACEMENT CHARACTER} [bold]"},
        {"service": "cache", "line": "last, unfinished"},
        {"service": "gateway", "line": "line 3"},
        {"service": "gateway", "line": "line 4"},
    ]
    assert logs.show(home, "cache", 2, follow=False, as_json=False) == 0
    assert capsys.readouterr().out == "[/odd] \N{REPLACEMENT CHARACTER} [bold]\nlast, unfinished\n"
    assert logs.show(home, "gateway", 0, follow=False, as_json=False) == 0
    assert capsys.readouterr().out == ""
    with pytest.raises(NotFound, match="cache, gateway"):
        logs.show(home, "../secrets/x", 5, follow=False, as_json=False)


def test_no_log_yet(home: Home) -> None:
    for service in (None, "gateway"):
        with pytest.raises(NotFound, match=f"no logs in {home.logs}"):
            logs.show(home, service, 5, follow=False, as_json=False)


def test_lines_that_are_being_written_are_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "x.log"
    with file.open("wb", buffering=0) as writer, file.open("rb") as reader:
        writer.write(b"one\ntw")
        assert list(logs._whole_lines(reader)) == [b"one\n"]
        assert list(logs._whole_lines(reader)) == []
        writer.write(b"o\nthree\n")
        assert list(logs._whole_lines(reader)) == [b"two\n", b"three\n"]


# plan


def environments(
    home: Home, options: SystemOptions, **environment: str
) -> dict[str, dict[str, str]]:
    return {
        spec.name: dict(spec.environment)
        for spec in child_specs(home, options, ENDPOINTS, environment)
    }


def test_every_service_gets_what_it_needs_and_no_more(home: Home) -> None:
    options = SystemOptions(port=7000, workers=2, link="200mbit", pool_bytes=5)
    plan = environments(
        home, options, PATH="/bin", PILOTLIGHT_DATABASE_URL="postgresql://owner:hidden@/d"
    )
    assert tuple(plan) == SERVICES
    assert "hidden" not in str(plan)
    assert {name for name, own in plan.items() if "PILOTLIGHT_DATABASE_URL" in own} == set(
        SERVICES
    ) - {"loader"}
    assert {name for name, own in plan.items() if "PILOTLIGHT_ADMIN_KEY_FILE" in own} == {"gateway"}
    assert {own["PATH"] for own in plan.values()} == {"/bin"}
    assert {own["PILOTLIGHT_NATS_URL"] for own in plan.values()} == {"nats://n"}
    assert plan["gateway"]["PILOTLIGHT_PORT"] == "7000"
    loader = plan["loader"]
    assert (
        loader["PILOTLIGHT_WORKERS"],
        loader["PILOTLIGHT_LINK"],
        loader["PILOTLIGHT_POOL_BYTES"],
    ) == ("2", "200mbit", "5")
    logs_of = {spec.log_path for spec in child_specs(home, options, ENDPOINTS, {})}
    assert logs_of == {home.logs / f"{name}.log" for name in SERVICES}


def test_a_second_gateway_takes_nothing_from_engines_where_cores_are_few() -> None:
    assert [default_gateways(cores) for cores in (1, 2, 15, 16, 128)] == [1, 1, 1, 4, 4]


def test_standbys_are_processes_with_names_and_logs_of_their_own(home: Home) -> None:
    options = SystemOptions(schedulers=3, gateways=2, caches=2)
    specs = {spec.name: spec for spec in child_specs(home, options, ENDPOINTS, {})}
    assert set(specs) == {*SERVICES, "scheduler-2", "scheduler-3", "gateway-2", "cache-2"}
    assert len({spec.log_path for spec in specs.values()}) == len(specs)
    assert specs["scheduler-3"].argv == specs["scheduler"].argv
    assert specs["scheduler-3"].log_path == home.logs / "scheduler-3.log"
    assert {
        specs[name].environment["PILOTLIGHT_SHARE_PORT"] for name in ("gateway", "gateway-2")
    } == {"true"}
    # Alone on its port, a gateway does not share it: another system's would take half of its
    # connections.
    assert environments(home, SystemOptions())["gateway"]["PILOTLIGHT_SHARE_PORT"] == "false"


def test_further_nodes_share_nothing_with_the_first(home: Home) -> None:
    """They stay where they are when the system is started again: their folders are below its."""
    own = ("RUN_DIR", "STATE_DIR", "LOG_DIR", "POOL_PATH")
    plan = environments(home, SystemOptions(nodes=3, workers=2))
    nodes = [plan[name] for name in ("loader", "loader-2", "loader-3")]
    for variable in own:
        assert len({one[f"PILOTLIGHT_{variable}"] for one in nodes}) == 3
    assert {one["PILOTLIGHT_WORKERS"] for one in nodes} == {"2"}
    assert plan["loader"] == environments(home, SystemOptions(workers=2))["loader"]


def test_logs_of_a_service_are_those_of_all_its_processes(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("scheduler", "scheduler-2", "scheduler-10", "scheduler-x"):
        (home.logs / f"{name}.log").write_text(f"from {name}\n")
    logs.show(home, "scheduler", 5, follow=False, as_json=True)
    shown = {json.loads(line)["service"] for line in capsys.readouterr().out.splitlines()}
    assert shown == {"scheduler", "scheduler-2", "scheduler-10"}
    logs.show(home, "scheduler-2", 5, follow=False, as_json=True)
    assert json.loads(capsys.readouterr().out)["service"] == "scheduler-2"


def test_the_users_model_roots_are_kept(home: Home) -> None:
    options = SystemOptions(model_roots=(Path("/demo"),))
    assert (
        environments(home, options)["gateway"]["PILOTLIGHT_MODEL_ROOTS"] == f"{home.models},/demo"
    )
    theirs = environments(home, options, PILOTLIGHT_MODEL_ROOTS="/data,/more")
    assert {own["PILOTLIGHT_MODEL_ROOTS"] for own in theirs.values()} == {"/data,/more,/demo"}


def test_a_copy_of_the_folder_has_a_pool_of_its_own(home: Home, tmp_path: Path) -> None:
    def pool(where: Path, **environment: str) -> str:
        return environments(Home(where), SystemOptions(), **environment)["loader"][
            "PILOTLIGHT_POOL_PATH"
        ]

    (tmp_path / "link").symlink_to(home.root)
    assert (
        pool(home.root) == pool(tmp_path / "link") == str(home.pool_path) != pool(tmp_path / "copy")
    )
    assert pool(home.root, PILOTLIGHT_POOL_PATH="/mine") == "/mine"
    assert pool(home.root, PILOTLIGHT_POOL_PATH="") == str(home.pool_path)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::1", "http://[::1]:8000"),
    ],
)
def test_where_the_gateway_answers(host: str, url: str) -> None:
    assert SystemOptions(host=host).url == url


@pytest.mark.anyio
async def test_a_second_system_leaves_the_first_ones_announcement(home: Home) -> None:
    lock = home.lock()
    home.announce("http://127.0.0.1:1")
    with pytest.raises(HomeInUse, match="in use"):
        async with System(home, SystemOptions(), lambda _: None):
            raise AssertionError
    assert home.running() is not None
    lock.close()


def test_an_admin_client_finds_the_running_system(home: Home) -> None:
    home.announce("http://127.0.0.1:1")
    with AdminClient.from_environment({}, home) as client:
        assert str(client._http.base_url).startswith("http://127.0.0.1:1/admin/v1")
        assert (
            client._http.headers["authorization"] == f"Bearer {home.admin_key.read_text().strip()}"
        )


def test_tables_cut_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node's name is copied from the table into the next command, however narrow the screen
    is.
    """
    monkeypatch.setenv("COLUMNS", "40")
    node = f"node-{'0123456789' * 3}"
    show_table(("node", "why"), [(node, "because " * 20), ("n", "[x]")], "none")
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["node", "why"]
    assert first.split() == [node, *["because"] * 20]
    assert second.split() == ["n", "[x]"]
