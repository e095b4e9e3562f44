"""The servers of ``bench/gateway.py``: the system with an engine that computes nothing, the bare
bound, and other gateways. All on this machine, each alone on it while it is asked.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from served_gpu_servers import ROOT, call, free_port, own_variables, running

HERE = Path(__file__).resolve().parent
DEMO = ROOT / "models" / "ember-7m"
TRACE_SHARE = 0.01
LIMITS = {
    "requests_per_minute": 10**7,
    "tokens_per_minute": 10**9,
    "concurrent_requests": 10**6,
    "tokens_per_month": 10**12,
}
TIMELESS = {
    "PILOTLIGHT_SIM_LOAD_BYTES_PER_S": "1e12",
    "PILOTLIGHT_SIM_PREFILL_TOKENS_PER_S": "1e12",
    "PILOTLIGHT_SIM_DECODE_STEP_S": "0",
}
LONG_CONTEXT = 262_144
READY_S = 90.0
LITELLM = """model_list:
  - model_name: m
    litellm_params: {model: openai/m, api_base: "http://127.0.0.1:%d/v1", api_key: x}
general_settings: {master_key: sk-bench}
litellm_settings: {telemetry: false, drop_params: true, request_timeout: 60}
"""


@dataclass(frozen=True)
class Server:
    """One that answers."""

    pid: int
    """All its processes descend from this one."""
    port: int
    model: str
    headers: dict[str, str] = field(default_factory=dict[str, str])


@contextlib.contextmanager
def ours(
    work: Path,
    *,
    gateways: int = 1,
    variables: Mapping[str, str] | None = None,
    model: Path = DEMO,
    kind: str = "sim",
) -> Iterator[Server]:
    """The whole system with one worker.

    Args:
        work: a folder for its state; it is made.
        gateways: processes of the gateway on one port.
        variables: settings beside those that make the engine take no time.
        model: the folder of the model that is registered.
        kind: of the worker.
    """
    work.mkdir(mode=0o711)
    home, log, port = work / "home", work / "pilotlight.log", free_port()
    environment = {
        **own_variables(),
        "PILOTLIGHT_HOME": str(home),
        "PILOTLIGHT_MODEL_ROOTS": str(model.parent),
        "PILOTLIGHT_POOL_BYTES": str(256 << 20),
        "PILOTLIGHT_TRACE_SAMPLE_RATIO": str(TRACE_SHARE),
        **TIMELESS,
        **(variables or {}),
    }
    code = "import sys; from pilotlight.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "up", "--json", "--port", str(port)]
    command += ["--worker-kind", kind, "--gateways", str(gateways)]

    def is_up() -> bool:
        return '"ready"' in log.read_text(errors="replace")

    with running(command, environment, log, is_up) as (pid, _):
        admin = (home / "admin.key").read_text().strip()
        body = {
            "name": "m",
            "uri": model.as_uri(),
            "slo": {"ttft_ms": 5000, "tpot_ms": 200},
            "keep_alive_s": 3600,
        }
        status, told = call(port, "POST", "/admin/v1/models", admin, body)
        if status >= 400:
            raise SystemExit(f"the model cannot be registered: {told}")
        headers = {"authorization": f"Bearer {limited_key(port, admin)}"}
        yield Server(pid, port, "m", headers)


def limited_key(port: int, admin: str) -> str:
    """A key with limits of every kind, as its project has, that no load here reaches."""
    project = "default/default"
    status, made = call(port, "POST", "/admin/v1/keys", admin, {"label": "bench"})
    if status >= 400:
        raise SystemExit(f"no key can be made: {made}")
    for path in (f"projects/{project}", f"keys/{made['key_id']}"):
        status, told = call(port, "PUT", f"/admin/v1/{path}/limits", admin, LIMITS)
        if status >= 400:
            raise SystemExit(f"{path} cannot be limited: {told}")
    return made["key"]


@contextlib.contextmanager
def processes(work: Path, commands: Mapping[str, list[str]], **variables: str) -> Iterator[int]:
    """Some processes beneath one, which ends them; its id.

    Args:
        work: a folder for their logs; it is made.
        commands: by name.
        variables: of their environment, beside this one's.
    """
    work.mkdir(mode=0o711)
    with contextlib.ExitStack() as stack:
        code = (
            "import json, signal, subprocess, sys\n"
            "signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
            "started = [subprocess.Popen(c, stdout=open(f'{n}.log', 'wb'), stderr=2)"
            " for n, c in json.loads(sys.argv[1]).items()]\n"
            "try: signal.pause()\n"
            "except KeyboardInterrupt: pass\n"
            "[each.kill() for each in started]; [each.wait() for each in started]\n"
        )
        parent = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(dict(commands))],
            cwd=work,
            env={**os.environ, **variables},
            stderr=stack.enter_context((work / "stderr.log").open("wb")),
        )
        try:
            yield parent.pid
        finally:
            parent.terminate()
            parent.wait(30)


@contextlib.contextmanager
def bare(work: Path, token_s: float = 0.0) -> Iterator[Server]:
    """A raw ASGI application, a NATS server and a worker that answers with constants."""
    port, bus = free_port(), free_port()
    program, url = str(HERE / "gateway_bare.py"), f"nats://127.0.0.1:{bus}"
    nats = shutil.which("nats-server", path=str(Path(sys.executable).parent))
    if nats is None:
        raise SystemExit("there is no nats-server beside this interpreter")
    commands = {
        "nats": [nats, "-a", "127.0.0.1", "-p", str(bus)],
        "gateway": [sys.executable, program, "serve", str(port), url],
        "worker": [sys.executable, program, "work", url, str(token_s)],
    }
    with processes(work, commands) as pid:
        server = Server(pid, port, "m")
        await_chat(server)
        yield server


@contextlib.contextmanager
def litellm(work: Path, python: str) -> Iterator[Server]:
    """LiteLLM's proxy before a server that answers at once: one worker, no database, no callbacks.

    Args:
        work: a folder for its files; it is made.
        python: an interpreter that has ``litellm[proxy]``.
    """
    port, behind = free_port(), free_port()
    config = work.with_suffix(".yaml")
    config.write_text(LITELLM % behind)
    program = str(Path(python).parent / "litellm")
    commands = {
        "backend": [sys.executable, str(HERE / "gateway_bare.py"), "backend", str(behind)],
        "litellm": [program, "--config", str(config), "--port", str(port), "--host", "127.0.0.1"],
    }
    with processes(work, commands, LITELLM_LOCAL_MODEL_COST_MAP="True") as pid:
        server = Server(pid, port, "m", {"authorization": "Bearer sk-bench"})
        await_chat(server)
        yield server


@contextlib.contextmanager
def router(work: Path, python: str, module: str) -> Iterator[Server]:
    """A router of an engine's project before a server that answers at once.

    Args:
        work: a folder for its logs; it is made.
        python: an interpreter that has it.
        module: the router's launcher.
    """
    port, behind = free_port(), free_port()
    urls = ["--worker-urls", f"http://127.0.0.1:{behind}", "--host", "127.0.0.1"]
    commands = {
        "backend": [sys.executable, str(HERE / "gateway_bare.py"), "backend", str(behind)],
        "router": [
            python,
            "-m",
            module,
            *urls,
            "--port",
            str(port),
            "--prometheus-port",
            str(free_port()),
        ],
    }
    with processes(work, commands) as pid:
        server = Server(pid, port, "m")
        await_chat(server)
        yield server


def await_chat(server: Server, deadline_s: float = READY_S) -> None:
    """Until a conversation is answered.

    Raises:
        SystemExit: it is not.
    """
    end_s, told = time.monotonic() + deadline_s, ""
    key = server.headers.get("authorization", "").removeprefix("Bearer ")
    while time.monotonic() < end_s:
        with contextlib.suppress(OSError):
            body: dict[str, Any] = {"model": server.model, "max_tokens": 8}
            body["messages"] = [{"role": "user", "content": "hello"}]
            status, told = call(server.port, "POST", "/v1/chat/completions", key, body)
            if status == 200:
                return
        time.sleep(0.2)
    raise SystemExit(f"no answer on port {server.port}: {told}")


def long_model(folder: Path) -> Path:
    """The demo model with a context of so many tokens that a long prompt fits."""
    shutil.copytree(DEMO, folder, copy_function=shutil.copy)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = LONG_CONTEXT
    (folder / "config.json").write_text(json.dumps(config))
    return folder
