"""Models that share one GPU: ``make bench-cache-gpu``, one JSON document.

Each part is a system of its own (``pilotlight up``: NATS, PostgreSQL, objects, gateway, one worker
on the device), with random bfloat16 weights in files that memory holds. ``--parts`` names those of
this run; each writes ``OUT/PART.json``, and one that is there is not measured again.

``switch-4B``, ``switch-8B``: the time to the first token at the client, 161 tokens in, of a request

* for a model that is on the device beside another one, by turns (``resident``),
* for a model that was evicted to the host pool (``from the host pool``),
* for a model that is loaded nowhere, with its files in the page cache (``again``), and the same
  with nothing compiled (``first``).

``zipf-iam``, ``zipf-lru``: twelve models of three sizes in turn, whose popularity follows Zipf's
law and not their sizes, over a device that holds ``--room`` of their bytes and a host pool that
holds ``--pool`` of them. One request after the other, the same for each policy. Told are seconds to
the first token, requests that found their model on the device, and loads.
"""

import argparse
import contextlib
import http.client
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import served_gpu_load as load
from cache_gpu_rows import measurements
from served_gpu import commit, machine
from served_gpu_models import Prompts, prepare
from served_gpu_servers import (
    COLD_PROMPT,
    ROOT,
    SHARED_MEMORY,
    SHARED_SHARE,
    Pilotlight,
    await_free_device,
    call,
    empty_caches,
    free_port,
    own_variables,
    running,
)

PARTS = ("switch-4B", "switch-8B", "zipf-iam", "zipf-lru")
MIXED = ("2B", "4B", "8B")
"""Sizes of the models under Zipf's law, in turn."""
MODELS, ZIPF, REQUESTS = 12, 1.0, 150
SWITCHES = 20
OUTPUT_TOKENS = 8
KEEP_ALIVE_S = 3600.0
ANSWER_S, GONE_S = 120.0, 60.0
ON_DEVICE_S = 0.25
"""A first token that takes longer may have waited for a load; counted from logs all the same."""
SEED = 5


@dataclass(frozen=True)
class Served:
    """A running system, as its clients know it."""

    port: int
    api_key: str
    admin_key: str

    def admin(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """One call of the admin API.

        Raises:
            SystemExit: it was refused.
        """
        status, told = call(self.port, method, f"/admin/v1{path}", self.admin_key, body)
        if status >= 400:
            raise SystemExit(f"{method} {path}: status {status}: {told}")
        return told

    def register(self, name: str, folder: Path) -> None:
        """A model that is never let go for idleness."""
        slo = {"ttft_ms": 5000, "tpot_ms": 200}
        body = {"name": name, "uri": folder.as_uri(), "slo": slo, "keep_alive_s": KEEP_ALIVE_S}
        self.admin("POST", "/models", body)

    def first_token_s(self, model: str, prompt: str) -> float:
        """Of one request, which is answered to its end.

        Raises:
            SystemExit: it failed.
        """
        target = load.Target("127.0.0.1", self.port, model, self.api_key)
        connection = http.client.HTTPConnection(target.host, target.port, timeout=ANSWER_S)
        first_s = None
        began_s = time.monotonic()
        try:
            headers = {"content-type": "application/json", **target.headers}
            body = json.dumps(target.body(prompt, OUTPUT_TOKENS))
            connection.request("POST", "/v1/completions", body, headers)
            response = connection.getresponse()
            for line in response:
                if first_s is None and has_text(line):
                    first_s = time.monotonic() - began_s
                if response.status != 200:
                    raise SystemExit(f"{model}: status {response.status}: {line!r}")
        finally:
            connection.close()
        if first_s is None:
            raise SystemExit(f"{model}: the answer has no text")
        return first_s

    def evict(self, model: str) -> None:
        """Off the device; its copy stays in the host pool.

        Raises:
            SystemExit: it stays.
        """
        self.admin("POST", f"/models/{model}/evict")
        end_s = time.monotonic() + GONE_S
        while any(
            held["model"] == model
            for worker in self.admin("GET", "/workers")["workers"]
            for held in worker["held"]
        ):
            if time.monotonic() > end_s:
                raise SystemExit(f"{model} was evicted, and a worker still has it")
            time.sleep(0.05)


def has_text(line: bytes) -> bool:
    """Whether an event of a streamed completion brings text."""
    if not line.startswith(b"data: {"):
        return False
    return any(choice.get("text") for choice in json.loads(line[6:]).get("choices", ()))


def variant(folder: Path, number: int) -> Path:
    """Another checkpoint of the same weights: a figure of its configuration differs, the files are
    the same ones.
    """
    made = folder.with_name(f"{folder.name}-{number}")
    if not made.is_dir():
        shutil.copytree(folder, made, copy_function=os.link)
        config = json.loads((made / "config.json").read_text())
        config["rope_theta"] += number
        (made / "config.json").unlink()
        (made / "config.json").write_text(json.dumps(config))
    return made


def size_of(folder: Path) -> int:
    """Bytes of a model's weights."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def zipf_trace(models: int, requests: int, seed: int, exponent: float = ZIPF) -> list[int]:
    """Numbers of models, each at least once; which is popular does not follow from its number."""
    rng = random.Random(f"cache-gpu/{seed}")
    weights = [1.0 / (place + 1) ** exponent for place in range(models)]
    rng.shuffle(weights)
    trace = rng.choices(range(models), weights, k=requests - models)
    for number in range(models):
        trace.insert(rng.randrange(len(trace) + 1), number)
    return trace


def told(seconds: Sequence[float]) -> dict[str, float]:
    """Mean and quantiles, in milliseconds."""
    ordered = sorted(seconds)

    def at(share: float) -> float:
        return round(1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)

    return {
        "samples": len(ordered),
        "mean_ms": round(1e3 * statistics.fmean(ordered), 1),
        "p50_ms": at(0.5),
        "p90_ms": at(0.9),
        "p99_ms": at(0.99),
    }


def switch(shape: str, weights: Path, work: Path, kind: str) -> dict[str, Any]:
    """What a request waits for, by where its model is."""
    folder = weights / shape
    prepare(shape, folder)
    other = variant(folder, 1)
    prompts = Prompts.of(folder)
    with Pilotlight(shape.lower(), folder, work, say).up(kind, 1) as up:
        home = work / "home"
        served = Served(up.target.port, up.target.key, (home / "admin.key").read_text().strip())
        served.register("other", other)
        names = (up.target.model, "other")
        asked = iter(prompts.draw(SEED, [COLD_PROMPT] * (4 * SWITCHES)))
        for name in names:
            served.first_token_s(name, next(asked))
        resident = [
            served.first_token_s(name, next(asked))
            for name in itertools.islice(itertools.cycle(names), 2 * SWITCHES)
        ]
        from_host: list[float] = []
        for _ in range(5):
            served.evict("other")
            from_host.append(served.first_token_s("other", next(asked)))
        return {
            "weights_bytes": size_of(folder),
            "cold": up.cold,
            "resident": told(resident),
            "from the host pool": told(from_host),
        }


@contextlib.contextmanager
def system(
    work: Path, variables: Mapping[str, str], kind: str, more: Sequence[str] = ()
) -> Generator[Served]:
    """A system without models.

    Args:
        work: for its files.
        variables: of its environment, beside our own.
        kind: of its workers.
        more: arguments of ``pilotlight up``.
    """
    home, log, port = work / "home", work / "pilotlight.log", free_port()
    code = "import sys; from pilotlight.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "up", "--json", "--port", str(port)]
    command += ["--worker-kind", kind, "--gateways", "1", *more]
    environment = {
        **own_variables(),
        **empty_caches(work),
        **variables,
        "PILOTLIGHT_HOME": str(home),
    }
    with running(
        command, environment, log, lambda: '"ready"' in log.read_text(errors="replace")
    ) as (_, start_s):
        say(f"Pilotlight is up after {start_s:.1f} s")
        keys = [(home / name).read_text().strip() for name in ("api.key", "admin.key")]
        yield Served(port, *keys)


@dataclass(frozen=True)
class Mix:
    """Models of mixed size, and what there is room for."""

    shapes: tuple[str, ...]
    models: int
    room: float
    pool: float
    requests: int
    kind: str


def zipf(policy: str, mix: Mix, weights: Path, work: Path) -> dict[str, Any]:
    """The trace under one policy."""
    for shape in mix.shapes:
        prepare(shape, weights / shape)
    shapes = [mix.shapes[number % len(mix.shapes)] for number in range(mix.models)]
    folders = [variant(weights / shape, number) for number, shape in enumerate(shapes)]
    total_bytes = sum(map(size_of, folders))
    largest_bytes = max(map(size_of, folders))
    shared = int(SHARED_SHARE * shutil.disk_usage(SHARED_MEMORY).free)
    variables = {
        "PILOTLIGHT_EVICTION_POLICY": policy,
        "PILOTLIGHT_MODEL_ROOTS": str(weights),
        # With room for the largest one's KV, whatever the share.
        "PILOTLIGHT_DEVICE_BYTES": str(max(int(mix.room * total_bytes), 2 * largest_bytes)),
        "PILOTLIGHT_POOL_BYTES": str(
            min(shared, max(int(mix.pool * total_bytes), 2 * largest_bytes, 64 << 20))
        ),
    }
    trace = zipf_trace(mix.models, mix.requests, SEED)
    with system(work, variables, mix.kind) as served:
        for number, folder in enumerate(folders):
            served.register(f"model-{number}", folder)
        prompts = Prompts.of(folders[0]).draw(SEED, [COLD_PROMPT] * len(trace))
        seconds: list[float] = []
        seen: set[int] = set()
        again_s: list[float] = []
        for number, prompt in zip(trace, prompts, strict=True):
            seconds.append(served.first_token_s(f"model-{number}", prompt))
            if number in seen:
                again_s.append(seconds[-1])
            seen.add(number)
        loads = loads_of(work / "home")
    reloads = sum(loads.values()) - len(loads)
    return {
        **variables,
        "models": dict(Counter(shapes)),
        "total_bytes": total_bytes,
        "requests": len(trace),
        "loads": sum(loads.values()),
        "reloads": reloads,
        "hit_ratio_but_first": round(1.0 - reloads / len(again_s), 4),
        "first_token": told(seconds),
        "first_token_but_first_requests": told(again_s),
        "slower_than_resident": sum(one > ON_DEVICE_S for one in again_s),
    }


def loads_of(home: Path) -> Counter[str]:
    """How often each model came to the device, by the worker's log."""
    found: Counter[str] = Counter()
    for path in home.glob("**/worker*.log"):
        for line in path.read_text(errors="replace").splitlines():
            if line.startswith("{") and '"stage_loading"' in line:
                event = json.loads(line)
                if event.get("action") == "stage_loading":
                    found[event["model"]] += 1
    return found


def say(words: str) -> None:
    """Progress."""
    print(f"… {words}", file=sys.stderr, flush=True)


def measured(part: str, asked: argparse.Namespace, work: Path) -> dict[str, Any]:
    """One part."""
    what, _, name = part.partition("-")
    if what == "switch":
        return switch("tiny" if asked.tiny else name, asked.weights, work, asked.kind)
    shapes = ("tiny", "tiny-2", "tiny-3") if asked.tiny else MIXED
    mix = Mix(shapes, asked.models, asked.room, asked.pool, asked.requests, asked.kind)
    return zipf(name, mix, asked.weights, work)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="also zipf-POLICY of any policy")
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "cache-gpu")
    parser.add_argument(
        "--weights", type=Path, help="folder in which weights stay for later; else a temporary one"
    )
    parser.add_argument(
        "--room", type=float, default=0.4, help="the device's, of all models' bytes"
    )
    parser.add_argument("--pool", type=float, default=0.6, help="the host pool's")
    parser.add_argument("--models", type=int, default=MODELS)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--kind", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="tiny models: whether it works at all")
    asked = parser.parse_args()
    # Told to end, it ends its servers and takes the weights away.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    asked.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pilotlight-cache-") as temporary:
        asked.weights = (asked.weights or Path(temporary) / "weights").absolute()
        Path(temporary).chmod(0o711)
        for part in asked.parts.split(","):
            file = asked.out / f"{part}.json"
            if file.is_file():
                say(f"{part}: is there")
                continue
            await_free_device()
            # PostgreSQL runs as another user when we are root, and passes through.
            work = Path(temporary) / part
            work.mkdir(mode=0o711)
            say(part)
            found = measured(part, asked, work)
            document = {
                "part": part,
                "machine": machine(),
                "commit": commit(),
                "date": datetime.now(UTC).date().isoformat(),
                "load": f"load average {os.getloadavg()[0]:.1f} after it",
                **found,
            }
            file.write_text(json.dumps(document, indent=2))
            say(f"{part}: {found}")
    parts = [json.loads(file.read_text()) for file in sorted(asked.out.glob("*.json"))]
    rows = [row for part in parts for row in measurements(part)]
    print(json.dumps({"benchmark": "cache_gpu", "measurements": rows, "parts": parts}, indent=2))


if __name__ == "__main__":
    main()
