"""A whole system with a model that can start from its artifact, for ways of
``bench/materialize.py`` that measure through all of it.

``pilotlight up`` (NATS, PostgreSQL, objects, gateway, one worker) has a model with random weights
in its host pool and an artifact of it in its store. Requests are sent by threads, and timed on the
clock by which the system tells when processes began.
"""

import contextlib
import http.client
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import served_gpu_load as load
from cache_gpu import Served, has_text, say, size_of, system
from served_gpu_models import Prompts, prepare
from served_gpu_servers import POOL_SHARE, SHARED_MEMORY, SHARED_SHARE

MODEL = "cold"
PROMPT_TOKENS, OUTPUT_TOKENS, SEED = 120, 64, 19
POOL_BYTES = 2 << 30
SLO = {"ttft_ms": 60_000.0, "tpot_ms": 1000.0}
"""What a request may wait for: it is sent when nobody can answer it."""
BUILT_S, ANSWER_S, RECORD_S, SETTLED_S = 240.0, 120.0, 10.0, 60.0
Row = dict[str, Any]


@dataclass(frozen=True)
class Whole:
    """A system whose model has been materialized."""

    served: Served
    home: Path
    caches: Path
    """Of compiled kernels."""
    pool: Path
    prompts: list[str]


def now_s() -> float:
    """On the clock by which the system tells when processes began."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


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


def gaps_ms(asked: Asked) -> list[float]:
    """Between the texts of an answer."""
    return [(b - a) * 1e3 for a, b in pairwise(asked.at_s)]


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


def phases(record: Mapping[str, Any], began_s: float, wall_offset_s: float) -> Row:
    """When each phase of a start's record ended; the last of those that have one name.

    Args:
        record: of the start.
        began_s: what is counted from.
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


def materialize(served: Served, model: str = MODEL) -> Row:
    """Has a model's artifact built; what there is then.

    Raises:
        SystemExit: it was not built.
    """
    served.admin("POST", f"/models/{model}/materialize")
    end_s = time.monotonic() + BUILT_S
    while time.monotonic() < end_s:
        found = served.admin("GET", f"/models/{model}/materials")
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


@contextlib.contextmanager
def materialized(shape: str, folder: Path, kind: str, prompts: int) -> Iterator[Whole]:
    """A system of a shape's, with as many prompts as are asked for."""
    weights = folder / "weights" / shape
    prepare(shape, weights)
    first, *others = Prompts.of(weights).draw(SEED, [PROMPT_TOKENS] * (prompts + 1))
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
                say(f"first token after {served.first_token_s(MODEL, first):.2f} s")
                say(f"materialized: {materialize(served)}")
                yield Whole(served, home, caches, pool, others)
            except BaseException:
                for log in sorted(home.glob("**/*.log")):
                    say(f"== {log.name}\n" + log.read_text(errors="replace")[-4000:])
                raise
            finally:
                pool.unlink(missing_ok=True)
