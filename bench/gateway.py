"""What the gateway costs: ``make bench-gateway``, on two cores, with an engine that takes no time.

Everything is real but the engine: NATS, PostgreSQL, scheduler, cache, loader and gateway as
processes, a worker that answers with tokens that are no computation, clients in a process of their
own over real sockets, with authentication, limits of the key and of its project, metrics and a
hundredth of the traces. ``--parts``
chooses:

* ``ours``: whole answers and streams of 32 tokens at 1, 16, 64 and 256 concurrent;
* ``bare``: the same of a raw ASGI application over NATS that does nothing else: the bound;
* ``litellm``, ``vllm-router``, ``sglang-router``: the same of other gateways before a server that
  answers at once, by the interpreter ``--peers-python`` that has them;
* ``two``: two gateways on one port;
* ``paced``: streams with 10 ms between tokens: what the way adds to them;
* ``held``: memory of 10,000 requests that wait for a model, above the idle gateway's;
* ``long``: prompts of 200,000 tokens beside short streams: are they right, and what do the others
  feel of it.

Every row is the median of its rounds. Processor time is /proc's, of the time that counts, by what
the processes are. Prints one JSON document; ends with 1 if an answer was wrong or a floor missed.
"""

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import gateway_servers as servers
import served_gpu_cpu as cpu
from gateway_client import Job
from gateway_verdicts import HELD, Row, median, missed, ratios
from served_gpu_load import Process
from served_gpu_servers import ROOT

CLIENT = Path(__file__).resolve().with_name("gateway_client.py")
PARTS = (
    "ours",
    "bare",
    "litellm",
    "vllm-router",
    "sglang-router",
    "two",
    "paced",
    "held",
    "long",
)
CHAT = "/v1/chat/completions"
CONCURRENCY = (1, 16, 64, 256)
TOKENS = 32
TOKEN_S = 0.010
HELD_PER_S, HELD_S = 250.0, 180.0
LONG_WORDS = 200_000
READY_S, GRACE_S = 60.0, 60.0
MESSAGES = [{"role": "user", "content": "hello there, how are you"}]


def body(*, stream: bool, **more: Any) -> dict[str, Any]:
    """A conversation that is answered with exactly so many tokens."""
    return {
        "model": "m",
        "messages": MESSAGES,
        "max_tokens": TOKENS,
        "stream": stream,
        **more,
    }


class Client:
    """A process that asks a server."""

    def __init__(self, server: servers.Server, asked: Mapping[str, Any], **job: Any) -> None:
        """Starts to ask. ``job`` is the rest of ``gateway_client.Job``."""
        self._server = server
        given = {"host": "127.0.0.1", "port": server.port, "path": CHAT, **job}
        self._job = Job(**given, headers=server.headers, body=dict(asked))
        self._process = Process(vars(self._job), CLIENT)

    def figures(self) -> Row:
        """When it is done: what it found, and what the server's processes took meanwhile."""
        before = self.read("begin")
        after = self.read("end")
        found = json.loads(self._process.line(GRACE_S))
        count = max(1, found["requests"])
        spent = cpu.taken(before, after)["roles"]
        found["per_s"] = round(found["requests"] / found["seconds"], 1)
        found["cpu_ms_each"] = {
            role: round(1e3 * taken["cpu_s"] / count, 4) for role, taken in spent.items()
        } | {"clients": round(1e3 * found["cpu_s"] / count, 4)}
        return found

    def read(self, word: str) -> cpu.Reading:
        """The server's processor time when the client says this word.

        Raises:
            SystemExit: it says something else.
        """
        line = self._process.line(READY_S + self._job.warm_s + self._job.duration_s)
        if line.strip() != word:
            raise SystemExit(f"the client said {line!r} and not {word!r}")
        return cpu.read(self._server.pid)

    def end(self) -> None:
        """Leave."""
        self._process.end()


@contextlib.contextmanager
def asking(server: servers.Server, asked: Mapping[str, Any], **job: Any) -> Iterator[Client]:
    """A client that is gone afterwards."""
    client = Client(server, asked, **job)
    try:
        yield client
    finally:
        client.end()


def ask(server: servers.Server, asked: Mapping[str, Any], **job: Any) -> Row:
    """A client's figures."""
    with asking(server, asked, **job) as client:
        return client.figures()


class Bench:
    """One run."""

    def __init__(self, asked: argparse.Namespace, work: Path) -> None:
        self._rounds: int = asked.rounds
        self._seconds: float = asked.seconds
        self._peers: str | None = asked.peers_python
        self._concurrency: tuple[int, ...] = asked.concurrency
        self._work = work
        self._long = servers.long_model(work / "long-model")

    def run(self, part: str) -> Any:
        """One part's rows."""
        work = self._work / part
        match part:
            case "ours":
                with servers.ours(work) as server:
                    return self._rows(server)
            case "two":
                with servers.ours(work, gateways=2) as server:
                    return self._rows(server)
            case "bare":
                with servers.bare(work) as server:
                    return self._rows(server)
            case "paced":
                return self._paced(work)
            case "held":
                return self._held(work)
            case "long":
                return self._long_prompts(work)
            case _:
                return self._peer(part, work)

    def _peer(self, part: str, work: Path) -> Any:
        if self._peers is None:
            return {"left_out": "--peers-python names no interpreter"}
        modules = {
            "vllm-router": "vllm_router.launch_router",
            "sglang-router": "sglang_router.launch_router",
        }
        try:
            with (
                servers.litellm(work, self._peers)
                if part == "litellm"
                else servers.router(work, self._peers, modules[part])
            ) as server:
                return self._rows(server)
        except (SystemExit, OSError) as error:
            return {"left_out": str(error)[:500]}

    def _rows(self, server: servers.Server) -> dict[str, Row]:
        """Whole answers and streams, by how many at a time."""
        found: dict[str, list[Row]] = {}
        for _ in range(self._rounds):
            for kind, stream in (("requests", False), ("streams", True)):
                for concurrency in self._concurrency:
                    row = ask(
                        server,
                        body(stream=stream),
                        concurrency=concurrency,
                        warm_s=0.5 if found else 2.0,
                        duration_s=self._seconds,
                    )
                    name = f"{kind} at {concurrency}"
                    say(f"{name}: {row['per_s']}/s, {row['cpu_ms_each']}, {row['errors']} errors")
                    found.setdefault(name, []).append(row)
        return {name: median(rows) | {"rounds": rows} for name, rows in found.items()}

    def _paced(self, work: Path) -> dict[str, Row]:
        """What the way adds to streams of an engine with a steady step."""
        found: dict[str, list[Row]] = {}
        with servers.ours(work, variables={"PILOTLIGHT_SIM_DECODE_STEP_S": str(TOKEN_S)}) as server:
            for _ in range(self._rounds):
                for concurrency in (1, 16, 64):
                    row = ask(
                        server,
                        body(stream=True),
                        concurrency=concurrency,
                        warm_s=1.0,
                        duration_s=max(self._seconds, 4.0),
                    )
                    ideal_ms = TOKENS * TOKEN_S * 1e3
                    for word in ("p50", "p95", "p99"):
                        row[f"added_ms_{word}"] = row[f"latency_ms_{word}"] - ideal_ms
                    say(f"paced at {concurrency}: {row['per_s']}/s, {row['added_ms_p99']} ms more")
                    found.setdefault(f"streams at {concurrency}", []).append(row)
        return {name: median(rows) | {"rounds": rows} for name, rows in found.items()}

    def _held(self, work: Path) -> Row:
        """Memory of requests that wait: who would start their model stands still."""
        limits = {
            "PILOTLIGHT_MAX_HELD": str(HELD + 64),
            "PILOTLIGHT_MAX_HELD_PER_MODEL": str(HELD + 64),
            "PILOTLIGHT_MAX_REQUESTS": str(HELD + 64),
            "PILOTLIGHT_HOLD_TIMEOUT_S": "600",
        }
        with (
            servers.ours(work, variables=limits) as server,
            standing_still(server.pid, "scheduler"),
        ):
            hold = {"concurrency": 1, "duration_s": 1.0, "hold": True}
            few = {**hold, "rate_per_s": HELD_PER_S, "most": 200, "warm_s": 2.0}
            ask(server, body(stream=True), **few)
            idle = memory(server.pid)
            many = {"most": HELD - 1, "warm_s": HELD / HELD_PER_S + 10.0}
            with asking(server, body(stream=True), **few | many) as client:
                client.read("begin")
                client.read("end")
                count, end_s = 0, time.monotonic() + HELD_S
                while count < HELD and time.monotonic() < end_s:
                    time.sleep(1.0)
                    with contextlib.suppress(TimeoutError):  # Of a machine with other work.
                        count = metric(server, "pilotlight_held_requests")
                held = memory(server.pid)
        found = {
            "held": count,
            "idle_bytes": idle,
            "held_bytes": held,
            "bytes_each": round((held - idle) / max(1, count)),
            "above_idle_bytes": held - idle,
            "errors": HELD - count,
        }
        say(f"held: {found}")
        return found

    def _long_prompts(self, work: Path) -> Row:
        """Short streams alone, and beside a client with long prompts, turn by turn."""
        step = {"PILOTLIGHT_SIM_DECODE_STEP_S": str(TOKEN_S)}
        text = "the light of a small flame " * (LONG_WORDS // 6)
        long = body(stream=False, messages=[{"role": "user", "content": text}])
        alone: list[Row] = []
        beside: list[Row] = []
        large: list[Row] = []
        times = {"concurrency": 8, "warm_s": 1.0, "duration_s": max(5.0, self._seconds)}
        with servers.ours(work, variables=step, model=self._long) as server:
            for _ in range(self._rounds):
                alone.append(ask(server, body(stream=True), **times))
                once = {**times, "concurrency": 1, "pause_s": 1.0}
                with asking(server, long, **once) as client:
                    beside.append(ask(server, body(stream=True), **times))
                    large.append(client.figures())
        found = {"alone": median(alone), "beside": median(beside), "long": median(large)}
        found["p99_times"] = round(
            found["beside"]["latency_ms_p99"] / found["alone"]["latency_ms_p99"], 3
        )
        say(f"long: others' p99 {found['p99_times']} times, {found['long']['requests']} long ones")
        return found


def memory(root_pid: int) -> int:
    """Resident bytes of all gateways beneath a process."""
    total = 0
    for pid, (role, _) in cpu.read(root_pid).processes.items():
        if role == "gateway":
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmRSS"):
                    total += int(line.split()[1]) * 1024
    return total


@contextlib.contextmanager
def standing_still(root_pid: int, role: str) -> Iterator[None]:
    """Processes of one role beneath another one are stopped meanwhile."""
    pids = [pid for pid, (its, _) in cpu.read(root_pid).processes.items() if its == role]
    if not pids:
        raise SystemExit(f"there is no {role} beneath {root_pid}")
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def metric(server: servers.Server, name: str) -> int:
    """One of the server's figures, over all that tell it."""
    page = str(servers.call(server.port, "GET", "/metrics")[1])
    return sum(
        round(float(line.rpartition(" ")[2]))
        for line in page.splitlines()
        if line.startswith(name) and line[len(name) : len(name) + 1] in (" ", "{")
    )


def say(words: str) -> None:
    """Progress."""
    print(f"… {words}", file=sys.stderr, flush=True)


def commit() -> str:
    """Of this tree."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%h %cs", "--abbrev=7"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="with commas between")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="that count, of each row")
    parser.add_argument("--peers-python", help="an interpreter that has the other gateways")
    parser.add_argument(
        "--concurrency",
        type=lambda words: tuple(map(int, words.split(","))),
        default=CONCURRENCY,
        help="with commas between",
    )
    asked = parser.parse_args()
    names = asked.parts.split(",")
    if unknown := set(names) - set(PARTS):
        parser.error(f"there is no part {unknown.pop()}: {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory(prefix="pilotlight-gateway-") as folder:
        # PostgreSQL runs as another user when we are root, and passes through.
        Path(folder).chmod(0o711)
        bench = Bench(asked, Path(folder))
        found: dict[str, Any] = {}
        for name in names:
            say(name)
            found[name] = bench.run(name)
    document = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "machine": f"{len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}",
        "load": f"load average {os.getloadavg()[0]:.1f} at its end",
        "command": " ".join(["bench/gateway.py", *sys.argv[1:]]),
        "missed": missed(found),
        "ratios": ratios(found),
        "parts": found,
    }
    print(json.dumps(document, indent=2))
    return 1 if document["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
