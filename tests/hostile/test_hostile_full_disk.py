"""A disk that fills up, servers that die while it is full, room again: no operator has to help."""

import json
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest
from confined import fill, inside
from embedded_system import DEADLINE_S
from small_disk import remove, server_pid, system_on, until

from pilotlight.common.clock import SystemClock

pytestmark = [
    pytest.mark.hostile,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts small disks: root alone may"),
]

MODEL = Path(__file__).resolve().parents[2] / "models" / "ember-7m"
WHOLE_WITHIN_S = 45.0
"""A wide limit: the servers' own backoffs are a few seconds."""
FULL_FOR_S = 4.0


@pytest.mark.parametrize(
    "killed",
    [(), ("nats-server",), ("postgres",), ("nats-server", "postgres")],
    ids=lambda names: "+".join(names) or "none",
)
def test_servers_that_die_on_a_full_disk(killed: tuple[str, ...]) -> None:
    """Warm streams go on meanwhile, readiness and a held cold request name the cause, and seconds
    after there is room all is well.
    """
    clock = SystemClock()
    with tempfile.TemporaryDirectory(prefix="pilotlight-hostile-") as folder:
        os.chmod(folder, 0o711)
        disk = Path(folder) / "disk"
        disk.mkdir(mode=0o711)
        with system_on(disk) as system, system.admin() as admin:
            http = httpx2.Client(
                headers={"Authorization": f"Bearer {system.key('api')}"}, timeout=DEADLINE_S
            )

            def ask(model: str) -> httpx2.Response:
                return http.post(
                    f"{system.url}/v1/completions",
                    json={"model": model, "prompt": "Once", "max_tokens": 4},
                )

            def ready() -> httpx2.Response:
                return http.get(f"{system.url}/readyz")

            for name in ("warm", "cold"):
                model = {
                    "name": name,
                    "uri": MODEL.as_uri(),
                    "slo": {"ttft_ms": 500, "tpot_ms": 200},
                }
                assert admin.post("/models", json=model).status_code == 201
            assert ask("warm").status_code == 200

            fillers = fill(inside(system.process.pid, disk))
            for name in killed:
                os.kill(server_pid(system, name), signal.SIGKILL)
            if "postgres" not in killed:
                until(lambda: "NATS stores nothing" in ready().text)
                assert ready().status_code == 503
                assert ask("warm").status_code == 200, "what is warm needs no stream"
                # Where no stream had to be begun anew there may be room for a few more words of an
                # instance.
                cold = ask("cold")
                assert cold.status_code == 503 or not killed
                assert (
                    cold.status_code == 200
                    or "NATS stores nothing" in cold.json()["error"]["message"]
                )
            else:
                threading.Event().wait(FULL_FOR_S)
            remove(fillers)
            freed_s = clock.monotonic_s()
            seconds: dict[str, float] = {}
            for what, whole in steps(ready, ask):
                until(whole, deadline_s=WHOLE_WITHIN_S)
                seconds[what] = round(clock.monotonic_s() - freed_s, 1)
            print(json.dumps({"killed": killed, "whole_after_s": seconds}))


def steps(
    ready: Callable[[], httpx2.Response], ask: Callable[[str], httpx2.Response]
) -> list[tuple[str, Callable[[], bool]]]:
    """What must hold, one after the other, once there is room."""
    return [
        ("ready", lambda: ready().status_code == 200),
        ("warm", lambda: ask("warm").status_code == 200),
        ("cold", lambda: ask("cold").status_code == 200),
    ]
