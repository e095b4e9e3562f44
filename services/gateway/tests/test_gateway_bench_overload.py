"""What ``make bench-overload`` and ``make soak-served`` make of their figures, and their client."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"
MIB = 1 << 20


@pytest.fixture(autouse=True)
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


def window(**changed: Any) -> dict[str, Any]:
    return {
        "requests": 900,
        "seconds": 1.0,
        "per_s": 900.0,
        "errors": 0,
        "asked_per_s": 2000.0,
        "refused_per_s": 0.0,
        "wrong": 0,
        "latency_ms_p50": 20.0,
        "latency_ms_p99": 90.0,
        "first_ms_p50": 10.0,
        "first_ms_p99": 80.0,
        "cpu_ms_each": {"gateway": 0.5},
        "memory_bytes": {"gateway": 100 * MIB},
        **changed,
    }


def document(*windows: dict[str, Any], after: float = 100.0) -> dict[str, Any]:
    return {
        "commit": "0123456 2026-11-27",
        "date": "2026-11-27",
        "machine": "two cores",
        "load": "none",
        "command": "bench/overload.py",
        "saturation_per_s": 1000.0,
        "times": 2.0,
        "share": 0.8,
        "wrong": [],
        "windows": list(windows),
        "memory_bytes": {
            "before": {"gateway": 100 * MIB},
            "after": {"gateway": int(after * MIB)},
        },
    }


def test_an_overload_that_it_bears_is_not_wrong():
    from overload import LEAST, measurement, verdicts

    refusing = window(errors=50, refused_per_s=50.0)
    found = document(*[refusing] * 3, *[window()] * 3, after=120.0)
    assert verdicts(found, LEAST) == []
    kept = measurement(found)
    assert (kept["commit"], kept["commit_date"]) == ("0123456", "2026-11-27")
    assert kept["samples"]["refused per second"] == [50.0] * 3 + [0.0] * 3
    assert kept["samples"]["gateway, MiB before and after"] == [100.0, 120.0]


@pytest.mark.parametrize(
    ("at", "changed", "after", "told"),
    [
        (1, {"wrong": 3, "first_errors": ["x"]}, 100.0, "3 wrong answers"),
        (5, {"refused_per_s": 7.0}, 100.0, "it had not come back: 7.0/s"),
        (2, {"requests": 100}, 100.0, "633/s answered under overload, of 1000.0"),
        (0, {}, 122.0, "the gateway kept 122.0 MiB, of 100.0 before"),
    ],
)
def test_what_it_does_not_bear_is_told(at, changed, after, told):
    from overload import LEAST, verdicts

    windows = [window() for _ in range(6)]
    windows[at] = window(**changed)
    (wrong,) = verdicts(document(*windows, after=after), LEAST)
    assert wrong.startswith(told)


def test_a_soak_is_flat_in_memory_and_in_its_slowest():
    from soak_served import verdicts

    flat = [window() for _ in range(10)]
    assert verdicts(flat, 900.0) == []
    late = [window(latency_ms_p99=140.0) for _ in range(2)]
    grown = [window(memory_bytes={"gateway": 130 * MIB}) for _ in range(2)]
    failed = [window(errors=1, first_errors=["HTTP/1.1 429"])]
    assert verdicts(flat[:8] + late, 900.0) == ["latency_ms_p99 grew from 90.0 to 140.0"]
    assert verdicts(flat[:8] + grown, 900.0) == ["gateway grew from 100.0 to 130.0 MiB"]
    assert verdicts(flat[:9] + failed, 900.0) == ["1 wrong answers: ['HTTP/1.1 429']"]
    assert verdicts(flat, 1000.0) == ["9000 answers of 10000 that were due"]


@pytest.mark.anyio
async def test_the_client_tells_refusals_apart_and_goes_on_when_a_connection_ends(capsys):
    from gateway_client import Client, Job

    asked = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        while await reader.readuntil(b"}"):
            asked += 1
            match asked % 4:
                case 0:
                    break
                case 1:
                    writer.write(b"HTTP/1.1 429 x\r\ncontent-length: 2\r\n\r\n{}")
                case 2:
                    writer.write(b"HTTP/1.1 500 x\r\ncontent-length: 2\r\n\r\n{}")
                case _:
                    writer.write(b"HTTP/1.1 200 x\r\ncontent-length: 2\r\n\r\n{}")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    job = Job(
        host="127.0.0.1",
        port=port,
        path="/",
        headers={},
        body={},
        concurrency=1,
        warm_s=0.0,
        duration_s=1.0,
        rate_per_s=100.0,
        rates_per_s=[100.0, 400.0],
        windows=2,
    )
    await Client(job).run()
    server.close()
    windows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line[0] == "{"]
    assert len(windows) == 2
    requests, errors = (sum(found[name] for found in windows) for name in ("requests", "errors"))
    refused = sum(found.get("refused", {}).get("429", 0) for found in windows)
    assert requests > 0
    assert 0 < refused < errors
