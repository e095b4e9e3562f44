"""The truly cold process, through the whole system: ``process`` of ``bench/materialize.py``.

A system (``pilotlight up``: NATS, PostgreSQL, objects, gateway, one worker) has a model with random
weights in its host pool and an artifact of it in its store. Then, ``ROUNDS`` times: the model is
evicted, the caches of compiled kernels are emptied, the loader, its worker and all engines are
killed at once, and a request is sent, which waits at the gateway while the supervisor starts a
loader again. The clock starts when that process does, and stops at the first text at the client.

With ``--node`` the loader finds a new node instead: no host pool, no state folder, so another name
for the node, and no word of GPUs; the weights' files are as the system's cache of files has them.
The supervisor stands still until the silence of the killed node has been noticed and the request is
sent: the system has no node then, and the new one is all that the first token waits for.

``python materialize_process.py SHAPE FOLDER KIND [--node]`` prints one line of JSON: each round, in
milliseconds since the loader began. By ``/proc``: ``worker`` and ``engine``, when their processes
began; by logs: ``planned`` (the loader knows its devices and begins its worker), ``up`` (the
engine), and how long the engine waited for its imports when the worker wanted it (``libraries``)
and for its device (``context``); by the start's record: each phase's end; by the client: ``ttft``,
``asked`` (negative: before the loader began). ``compiled`` counts kernels that were compiled in the
round, and ``restored`` says whether the start came from the artifact.
"""

import contextlib
import http.client
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import served_gpu_load as load
from cache_gpu import Served, has_text, say, size_of, system
from served_gpu_models import Prompts, prepare
from served_gpu_servers import POOL_SHARE, SHARED_MEMORY, SHARED_SHARE

MODEL, ROUNDS = "cold", 3
PROMPT_TOKENS, OUTPUT_TOKENS, SEED = 120, 64, 19
POOL_BYTES = 2 << 30
SLO = {"ttft_ms": 60_000.0, "tpot_ms": 1000.0}
"""What a request may wait for: it is sent when nobody can answer it."""
BUILT_S, ANSWER_S, RECORD_S, SETTLED_S, LOOK_S = 240.0, 120.0, 10.0, 60.0, 0.002
SLOW_S = 8.0
"""A round that takes longer tells what the system's processes wrote in it."""
LOADER, WORKER = "pilotlight.loader", "pilotlight.worker"
ENGINE = "pilotlight.worker.engine_child.child"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
EVENTS = {"workers_planned": "planned_ms", "engine_started": "up_ms"}
"""Lines of logs, and what the first one of a round is called."""
TOOK = {"libraries_s": "libraries_ms", "context_s": "context_ms"}
Row = dict[str, Any]


def now_s() -> float:
    """On the clock by which the system tells when processes began."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True)
class Process:
    """One of the system's, with the program that it runs."""

    pid: int
    parent: int
    began_s: float
    program: str


def processes(home: Path) -> list[Process]:
    """The loader of a system, its workers and their engines."""
    found: list[Process] = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            modules = [os.fsdecode(word) for word in words if word.startswith(b"pilotlight.")]
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            if not modules or stat[0] in "ZX":
                continue
            ours = f"PILOTLIGHT_HOME={home}".encode() in (entry / "environ").read_bytes().split(
                b"\0"
            )
            # An engine is given none of our variables: it is known by its parent.
            if ours or modules[0] == ENGINE:
                began_s = int(stat[19]) / TICKS_PER_S
                found.append(Process(int(entry.name), int(stat[1]), began_s, modules[0]))
    node = {LOADER, WORKER}
    ours_by_pid = {one.pid for one in found if one.program in node}
    return [one for one in found if one.pid in ours_by_pid or one.parent in ours_by_pid]


@dataclass
class Asked:
    """A request in a thread of its own."""

    served: Served
    prompt: str
    sent_s: float = 0.0
    at_s: list[float] = field(default_factory=list[float])
    trace_id: str = ""
    failed: str = ""

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self.sent_s = now_s()
        self._thread.start()

    def wait(self) -> None:
        """Until it is answered.

        Raises:
            SystemExit: it failed.
        """
        self._thread.join(ANSWER_S)
        if self.failed or not self.at_s or self._thread.is_alive():
            raise SystemExit(f"the request failed: {self.failed or 'there is no text'}")

    def _ask(self) -> None:
        target = load.Target("127.0.0.1", self.served.port, MODEL, self.served.api_key)
        connection = http.client.HTTPConnection(target.host, target.port, timeout=ANSWER_S)
        try:
            body = json.dumps(target.body(self.prompt, OUTPUT_TOKENS))
            headers = {"content-type": "application/json", **target.headers}
            connection.request("POST", "/v1/completions", body, headers)
            response = connection.getresponse()
            self.trace_id = response.headers.get("x-trace-id", "")
            for line in response:
                if response.status != 200 or b'"error"' in line:
                    self.failed = f"status {response.status}: {line!r}"
                    return
                if has_text(line):
                    self.at_s.append(now_s())
        except OSError as error:
            self.failed = str(error)
        finally:
            connection.close()


@dataclass
class Logs:
    """Lines that a system's processes have written since the last look."""

    home: Path
    _seen: dict[Path, int] = field(default_factory=dict[Path, int])

    def news(self) -> Iterator[dict[str, Any]]:
        """Each as it was written; lines of other programs are left out."""
        for path in sorted(self.home.glob("**/*.log")):
            data = path.read_bytes()
            start = self._seen.get(path, 0)
            self._seen[path] = len(data)
            for line in data[start if start <= len(data) else 0 :].splitlines():
                with contextlib.suppress(ValueError):
                    told = json.loads(line)
                    if isinstance(told, dict):
                        yield told


def timeline(lines: Iterator[dict[str, Any]], began_s: float, wall_offset_s: float) -> Row:
    """What logs say of a start.

    Args:
        lines: of the logs, in any order.
        began_s: when the loader did.
        wall_offset_s: from that clock to the wall's.
    """
    row: Row = {"compiled": 0}
    for line in lines:
        action = line.get("action")
        row["compiled"] += action == "kernel_compiled"
        name = EVENTS.get(str(action))
        if name is None:
            continue
        at_s = datetime.fromisoformat(line["timestamp"]).timestamp() - wall_offset_s
        row[name] = min(row.get(name, float("inf")), (at_s - began_s) * 1e3)
        row |= {TOOK[key]: 1e3 * line[key] for key in TOOK if key in line}
    return row


def phases(record: Mapping[str, Any], began_s: float, wall_offset_s: float) -> Row:
    """When each phase of a start's record ended; the last of those that have one name.

    Args:
        record: of the start.
        began_s: when the loader did.
        wall_offset_s: from that clock to the wall's.
    """
    row: Row = {}
    for phase in record.get("phases", ()):
        name = f"{phase['name']}_end_ms"
        end_s = phase["end_s"] + phase["wall_offset_s"] - wall_offset_s
        end_ms = (end_s - began_s) * 1e3
        row[name] = max(row.get(name, end_ms), end_ms)
    return row


def record_of(served: Served, trace_id: str) -> Row:
    """The cold start of a trace; it is written a moment after the answer."""
    end_s = time.monotonic() + RECORD_S
    while time.monotonic() < end_s:
        with contextlib.suppress(SystemExit):
            found = served.admin("GET", f"/traces/{trace_id}")["cold_starts"]
            if found and found[-1]["status"] == "done":
                return dict(found[-1])
        time.sleep(0.1)
    return {}


def materialize(served: Served) -> Row:
    """Has the model's artifact built; what there is then.

    Raises:
        SystemExit: it was not built.
    """
    served.admin("POST", f"/models/{MODEL}/materialize")
    end_s = time.monotonic() + BUILT_S
    while time.monotonic() < end_s:
        found = served.admin("GET", f"/models/{MODEL}/materials")
        if found.get("artifacts"):
            return dict(found)
        failed = [one for one in found.get("builds", ()) if one["state"] == "failed"]
        if failed:
            raise SystemExit(f"the build failed: {failed[-1]}")
        time.sleep(0.2)
    raise SystemExit(f"the model was not materialized in {BUILT_S:g} s")


def settled(served: Served) -> None:
    """Until the worker is up, holds nothing and builds nothing any more."""
    end_s = time.monotonic() + SETTLED_S
    while time.monotonic() < end_s:
        workers = served.admin("GET", "/workers")["workers"]
        if workers and all(one["engine_up"] and not one["held"] for one in workers):
            return
        time.sleep(0.1)
    raise SystemExit("the worker is not up, or holds a model")


def supervisor_of(home: Path) -> int:
    """The process that starts the loader again."""
    return next(one.parent for one in processes(home) if one.program == LOADER)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process stands still meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def killed(home: Path) -> set[int]:
    """Kills the node's processes; their ids."""
    victims = processes(home)
    # Who would start the others again goes first.
    for one in sorted(victims, key=lambda one: one.began_s):
        with contextlib.suppress(ProcessLookupError):
            os.kill(one.pid, signal.SIGKILL)
    return {one.pid for one in victims}


def without_node(served: Served) -> None:
    """Until the system knows of no worker that lives."""
    end_s = time.monotonic() + SETTLED_S
    while time.monotonic() < end_s:
        workers = served.admin("GET", "/workers")["workers"]
        if all(one["liveness"] == "dead" for one in workers):
            return
        time.sleep(0.1)
    raise SystemExit("the killed node is not taken for dead")


def started(home: Path, before: set[int], until: threading.Event) -> dict[str, float]:
    """When the new processes of each program began, the first of each, until it is told to end."""
    found: dict[str, float] = {}
    while not until.wait(LOOK_S):
        for one in processes(home):
            if one.pid not in before:
                found[one.program] = min(found.get(one.program, one.began_s), one.began_s)
        if {LOADER, WORKER, ENGINE} <= found.keys():
            break
    return found


def one_round(
    served: Served, home: Path, caches: Path, prompt: str, logs: Logs, pool: Path | None
) -> Row:
    """One cold process; on a new node, where there is a ``pool`` to be removed."""
    served.evict(MODEL)
    settled(served)
    shutil.rmtree(caches, ignore_errors=True)
    for _ in logs.news():
        pass
    wall_offset_s = time.time() - now_s()
    with contextlib.ExitStack() as standing:
        if pool is not None:
            standing.enter_context(stopped(supervisor_of(home)))
        before = killed(home)
        if pool is not None:
            pool.unlink(missing_ok=True)
            shutil.rmtree(home / "state", ignore_errors=True)
            without_node(served)
        asked, found = Asked(served, prompt), dict[str, float]()
    done = threading.Event()
    watch = threading.Thread(target=lambda: found.update(started(home, before, done)), daemon=True)
    watch.start()
    try:
        asked.wait()
    finally:
        done.set()
        watch.join()
    began_s = found[LOADER]
    record = record_of(served, asked.trace_id)
    lines = list(logs.news())
    if asked.at_s[0] - began_s > SLOW_S:
        for line in sorted(lines, key=lambda line: str(line.get("timestamp"))):
            say(json.dumps(line))
    gaps_s = sorted(b - a for a, b in zip(asked.at_s, asked.at_s[1:], strict=False))
    return {
        "ttft_ms": (asked.at_s[0] - began_s) * 1e3,
        "asked_ms": (asked.sent_s - began_s) * 1e3,
        "worker_ms": (found.get(WORKER, began_s) - began_s) * 1e3,
        "engine_ms": (found.get(ENGINE, began_s) - began_s) * 1e3,
        **timeline(iter(lines), began_s, wall_offset_s),
        **phases(record, began_s, wall_offset_s),
        "worst_gap_ms": gaps_s[-1] * 1e3 if gaps_s else 0.0,
        "restored": int("restore" in {one["name"] for one in record.get("phases", ())}),
    }


def measure(shape: str, folder: Path, kind: str, *, node: bool) -> Row:
    """All rounds of a system of its own; ``node``: each on a new node."""
    weights = folder / "weights" / shape
    prepare(shape, weights)
    prompts = Prompts.of(weights).draw(SEED, [PROMPT_TOKENS] * (ROUNDS + 1))
    shared = int(SHARED_SHARE * shutil.disk_usage(SHARED_MEMORY).free)
    with tempfile.TemporaryDirectory(prefix="pilotlight-process-") as temporary:
        # PostgreSQL runs as another user when we are root, and passes through.
        Path(temporary).chmod(0o711)
        work = Path(temporary)
        home, caches = work / "home", work / "caches"
        pool = SHARED_MEMORY / f"pilotlight-process-{os.getpid()}.pool"
        variables = {
            "PILOTLIGHT_MODEL_ROOTS": str(weights.parent),
            "PILOTLIGHT_POOL_PATH": str(pool),
            "PILOTLIGHT_POOL_BYTES": str(
                min(shared, int(size_of(weights) * POOL_SHARE) + POOL_BYTES)
            ),
            "PILOTLIGHT_ARTIFACT_GRAPHS": "true",
            "PILOTLIGHT_BUILD_IDLE_S": "0.5",
            "PILOTLIGHT_SPARE_ENGINE": "false",
            # As who installs it leaves it: compiled by the processes that run before the rounds.
            "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
            "PYTHONDONTWRITEBYTECODE": "",
        }
        with system(work, variables, kind) as served:
            try:
                body = {"name": MODEL, "uri": weights.as_uri(), "slo": SLO, "keep_alive_s": 3600}
                served.admin("POST", "/models", body)
                say(f"first token after {served.first_token_s(MODEL, prompts[0]):.2f} s")
                say(f"materialized: {materialize(served)}")
                logs = Logs(home)
                new = pool if node else None
                rounds = [
                    one_round(served, home, caches, prompt, logs, new) for prompt in prompts[1:]
                ]
            except BaseException:
                for log in sorted(home.glob("**/*.log")):
                    say(f"== {log.name}\n" + log.read_text(errors="replace")[-4000:])
                raise
            finally:
                pool.unlink(missing_ok=True)
    return {"rounds": rounds}


if __name__ == "__main__":
    made = measure(
        sys.argv[1], Path(sys.argv[2]).absolute(), sys.argv[3], node="--node" in sys.argv
    )
    print(json.dumps(made))
