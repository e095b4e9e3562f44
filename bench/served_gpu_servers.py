"""The servers of ``bench/served_gpu.py``: Pilotlight as ``pilotlight up`` starts it, and ``vllm
serve``.

One at a time has the device.
"""

import contextlib
import functools
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import served_gpu_load as load
from served_gpu_models import Prompts
from served_gpu_up import NO_SLO_MS, Up, slo

ROOT = Path(__file__).resolve().parents[1]
START_S, STOP_S, CALL_S, RECORD_S = 240.0, 60.0, 60.0, 10.0
POLL_S = 0.02
FREE_BYTES, FREE_S = 3 << 30, 60.0
"""A device is free when no more than this is in use, and is waited for so long."""
COLD_SEED, COLD_PROMPT, COLD_OUTPUT = 7, 161, 16
COLDS = (("first", False), ("again", True), ("from the host pool", False))
"""What a cold start is called, and whether the files get new times before it. The host pool keeps
the parameters of a deleted model, and knows them again by names, sizes and times of their files."""
POOL_SHARE, POOL_BYTES = 2.3, 2 << 30
"""The host pool has room for the model twice, and this, if shared memory has."""
SHARED_MEMORY, SHARED_SHARE = Path("/dev/shm"), 0.8
VLLM_IMPORT_S = 180.0
VLLM_KV = re.compile(r"GPU KV cache size: ([\d,]+) tokens")
TAIL_CHARS = 3000

Say = Callable[[str], None]


def free_port() -> int:
    """One that is not in use."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def own_variables() -> dict[str, str]:
    """The environment in which this tree's own code goes before what is installed."""
    sources = [
        str(path)
        for path in sorted(ROOT.glob("*/*/src"))
        if path.parent.parent.name in ("libs", "services")
    ]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*sources, os.environ.get("PYTHONPATH", "")]).strip(
            os.pathsep
        ),
    }


def empty_caches(work: Path) -> dict[str, str]:
    """Nothing is compiled yet, for whoever compiles."""
    names = (
        "TRITON_CACHE_DIR",
        "CUDA_CACHE_PATH",
        "TORCHINDUCTOR_CACHE_DIR",
        "VLLM_CACHE_ROOT",
        "TORCH_EXTENSIONS_DIR",
    )
    return {name: str(work / "caches" / name.lower()) for name in names}


def used_bytes_of_device() -> int | None:
    """What NVIDIA's tool says of the first device that is shown; None where there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip() or "0"
    ask = f"nvidia-smi --id={shown} --query-gpu=memory.used --format=csv,noheader,nounits".split()
    told = subprocess.run(ask, capture_output=True, text=True, timeout=CALL_S, check=False)
    used = told.stdout.split() if told.returncode == 0 else []
    return int(used[0]) << 20 if used else None


def await_free_device() -> None:
    """Until nobody has the device.

    Raises:
        SystemExit: somebody keeps it.
    """
    end_s = time.monotonic() + FREE_S
    while (used := used_bytes_of_device()) is not None and used > FREE_BYTES:
        if time.monotonic() > end_s:
            raise SystemExit(f"{used >> 20} MiB of the device are in use by something else")
        time.sleep(1.0)


def call(
    port: int, method: str, path: str, key: str = "", body: Mapping[str, Any] | None = None
) -> tuple[int, Any]:
    """One request; status, and the document or the text.

    Raises:
        OSError: nobody answers.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=CALL_S)
    try:
        headers = {"content-type": "application/json"} | (
            {"authorization": f"Bearer {key}"} if key else {}
        )
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    finally:
        connection.close()
    try:
        return response.status, json.loads(text)
    except ValueError:
        return response.status, text


@contextlib.contextmanager
def running(
    command: list[str], variables: Mapping[str, str], log: Path, is_up: Callable[[], bool]
) -> Iterator[tuple[int, float]]:
    """A process that is up, and at the end is no more; with its id, and the seconds until it was
    up.

    Raises:
        SystemExit: it ended, or was not up in time; the end of what it said is in the message.
    """
    began_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,
        )
    try:
        while not is_up():
            if process.poll() is not None or time.monotonic() > began_s + START_S:
                why = "is not up" if process.poll() is None else f"ended with {process.returncode}"
                raise SystemExit(
                    f"{Path(command[0]).name} {why}: {log.read_text(errors='replace')[-TAIL_CHARS:]}"
                )
            time.sleep(POLL_S)
        yield process.pid, time.monotonic() - began_s
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(STOP_S)


def first_token_s(target: load.Target, prompt: str) -> tuple[float, str]:
    """Of one request alone, with its trace.

    Raises:
        SystemExit: it was not answered as it should have been.
    """
    answers, wrong = load.ask(target, load.Load([prompt], [COLD_PROMPT], [COLD_OUTPUT], 1))
    if wrong:
        raise SystemExit(f"the first request failed: {wrong}")
    return answers[0].first_s - answers[0].sent_s, answers[0].trace_id


class Pilotlight:
    """An embedded system with one worker."""

    def __init__(
        self,
        model: str,
        folder: Path,
        work: Path,
        say: Say,
        colds: Sequence[tuple[str, bool]] = COLDS,
    ) -> None:
        self._model, self._folder, self._say, self._colds = model, folder, say, colds
        self._home = work / "home"
        self._log = work / "pilotlight.log"
        self._port = free_port()
        self._work = work

    @contextlib.contextmanager
    def up(self, worker_kind: str, gateways: int | None) -> Iterator[Up]:
        """The system with the model registered and served; its cold starts are measured."""
        variables = {
            **own_variables(),
            **empty_caches(self._work),
            "PILOTLIGHT_HOME": str(self._home),
            "PILOTLIGHT_MODEL_ROOTS": str(self._folder.parent),
            "PILOTLIGHT_POOL_BYTES": os.environ.get("PILOTLIGHT_POOL_BYTES")
            or str(self._pool_bytes()),
        }
        code = "import sys; from pilotlight.cli.main import main; sys.exit(main())"
        command = [
            sys.executable,
            "-c",
            code,
            "up",
            "--json",
            "--port",
            str(self._port),
            "--worker-kind",
            worker_kind,
        ]
        command += ["--gateways", str(gateways)] if gateways is not None else []
        with running(
            command,
            variables,
            self._log,
            lambda: '"ready"' in self._log.read_text(errors="replace"),
        ) as (pid, start_s):
            self._say(f"Pilotlight is up after {start_s:.1f} s")
            up = Up("ours", pid, self._target("none"))
            self._cold(up)
            workers = self._admin("GET", "/workers")["workers"]
            instances = [
                each["body"]
                for each in self._admin("GET", "/instances")["instances"]
                if each["model"] == up.target.model
            ]
            up.about = {
                "start_s": round(start_s, 2),
                "devices": [each["device"] for each in workers],
                "device_bytes": [
                    place["device_bytes"] for each in instances for place in each["placements"]
                ],
                "weights_bytes": self._size(),
                "gateways": gateways or 1,
            }
            yield up

    def _size(self) -> int:
        return sum(path.stat().st_size for path in self._folder.glob("*.safetensors"))

    def _pool_bytes(self) -> int:
        wanted = int(self._size() * POOL_SHARE) + POOL_BYTES
        return min(wanted, int(shutil.disk_usage(SHARED_MEMORY).free * SHARED_SHARE))

    def _touch(self) -> None:
        """As if the files were others."""
        for path in self._folder.glob("*.safetensors"):
            os.utime(path)

    def _target(self, name: str) -> load.Target:
        key = (self._home / "api.key").read_text().strip()
        return load.Target("127.0.0.1", self._port, name, key)

    def _admin(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        key = (self._home / "admin.key").read_text().strip()
        status, told = call(self._port, method, f"/admin/v1{path}", key, body)
        if status >= 400:
            raise SystemExit(f"{method} {path}: status {status}: {told}")
        return told

    def _cold(self, up: Up) -> None:
        """Register it and ask, then delete it and so on: each time no worker has it.

        The last stays.
        """
        found: dict[str, dict[str, Any]] = {}
        prompt = Prompts.of(self._folder).draw(COLD_SEED, [COLD_PROMPT])[0]
        for number, (name, touched) in enumerate(self._colds):
            if number:
                self._forget(up.target.model)
            if touched:
                self._touch()
            up.target = self._target(f"{self._model}-{number}")
            body = {
                "name": up.target.model,
                "uri": self._folder.as_uri(),
                "slo": slo(*NO_SLO_MS),
                "keep_alive_s": 3600,
            }
            began_s = time.monotonic()
            self._admin("POST", "/models", body)
            registered_s = time.monotonic() - began_s
            seconds, trace_id = first_token_s(up.target, prompt)
            found[name] = {
                "first_token_s": round(seconds, 3),
                "phases_s": self._phases(trace_id),
                "registered_s": round(registered_s, 3),
            }
            self._say(
                f"cold start, {name}: first token after {seconds:.2f} s, {found[name]['phases_s']}"
            )
        up.cold = found
        up.declare = functools.partial(self._declare, up)

    def _declare(self, up: Up, ttft_ms: float, tpot_ms: float) -> None:
        body = {"slo": slo(ttft_ms, tpot_ms)}
        self._admin("PATCH", f"/models/{up.target.model}", body)

    def _forget(self, model: str) -> None:
        """Delete it, and wait until no worker has anything of it."""
        self._admin("DELETE", f"/models/{model}")
        end_s = time.monotonic() + STOP_S
        while any(worker["held"] for worker in self._admin("GET", "/workers")["workers"]):
            if time.monotonic() > end_s:
                raise SystemExit(f"{model} was deleted, and a worker still has it")
            time.sleep(0.1)

    def _phases(self, trace_id: str) -> dict[str, float]:
        """Seconds of each phase of the cold start; its record is written a moment after the
        answer.
        """
        end_s = time.monotonic() + RECORD_S
        while time.monotonic() < end_s:
            key = (self._home / "admin.key").read_text().strip()
            status, told = call(self._port, "GET", f"/admin/v1/traces/{trace_id}", key)
            found = told["cold_starts"] if status == 200 else []
            if found and found[0]["status"] == "done":
                seconds: dict[str, float] = {}
                for phase in found[0]["phases"]:
                    seconds[phase["name"]] = round(
                        seconds.get(phase["name"], 0.0) + phase["end_s"] - phase["start_s"], 4
                    )
                return seconds
            time.sleep(0.1)
        return {}


def cold_from_start(start_s: float, first_request_s: float) -> dict[str, Any]:
    """The one cold start of a server that has its model from its process's start."""
    return {
        "first": {
            "first_token_s": round(start_s + first_request_s, 3),
            "start_s": round(start_s, 3),
            "first_request_s": round(first_request_s, 3),
        }
    }


class Vllm:
    """``vllm serve`` with its defaults, by an interpreter that has it."""

    def __init__(self, python: str, folder: Path, work: Path, say: Say) -> None:
        self._python, self._folder, self._work, self._say = python, folder, work, say
        self._log = work / "vllm.log"
        self._port = free_port()

    @contextlib.contextmanager
    def up(self) -> Iterator[Up]:
        """The server with the model loaded: its cold start is from the process's start to the first
        token.
        """
        # Our own sources are nothing for another interpreter.
        variables = {
            name: value for name, value in os.environ.items() if name != "PYTHONPATH"
        } | empty_caches(self._work)
        variables |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
        self._say("reading vLLM's files once, so that they are in the page cache")
        code = "import vllm, vllm.entrypoints.openai.api_server; print(vllm.__version__)"
        subprocess.run(
            [self._python, "-c", code],
            env=variables,
            stdout=sys.stderr,
            timeout=VLLM_IMPORT_S,
            check=False,
        )
        command = [self._python, "-m", "vllm.entrypoints.cli.main", "serve", str(self._folder)]
        command += [
            "--host",
            "127.0.0.1",
            "--port",
            str(self._port),
            "--served-model-name",
            "served",
        ]
        with running(command, variables, self._log, self._is_up) as (pid, start_s):
            self._say(f"vLLM is up after {start_s:.1f} s")
            up = Up("vllm", pid, load.Target("127.0.0.1", self._port, "served"))
            prompt = Prompts.of(self._folder).draw(COLD_SEED, [COLD_PROMPT])[0]
            seconds, _ = first_token_s(up.target, prompt)
            up.cold = cold_from_start(start_s, seconds)
            found = VLLM_KV.search(self._log.read_text(errors="replace"))
            up.about = {
                "version": call(self._port, "GET", "/version")[1],
                "kv_tokens": found and found[1],
            }
            yield up

    def _is_up(self) -> bool:
        try:
            return call(self._port, "GET", "/health")[0] == 200
        except OSError:
            return False
