"""A whole system whose disk and whose shared memory fill up while it runs, in a home with an
awkward name.
"""

import os
import tempfile
from pathlib import Path

import httpx2
import pytest
from confined import fill, inside
from embedded_system import DEADLINE_S
from small_disk import SHARED_MEMORY, remove, system_on, until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts small disks: root alone may"),
]

MODEL = Path(__file__).resolve().parents[2] / "models" / "ember-7m"


def test_a_full_disk_and_full_shared_memory_refuse_and_pass() -> None:
    with tempfile.TemporaryDirectory(prefix="pilotlight-e2e-") as folder:
        os.chmod(folder, 0o711)
        disk = Path(folder) / "disk"
        disk.mkdir(mode=0o711)
        with system_on(disk) as system, system.admin() as admin:
            api = httpx2.Client(
                base_url=f"{system.url}/v1",
                headers={"Authorization": f"Bearer {system.key('api')}"},
                timeout=DEADLINE_S,
            )

            def ask() -> httpx2.Response:
                return api.post(
                    "/completions", json={"model": "m", "prompt": "Once", "max_tokens": 4}
                )

            def register(name: str) -> httpx2.Response:
                return admin.post(
                    "/models",
                    json={
                        "name": name,
                        "uri": MODEL.as_uri(),
                        "slo": {"ttft_ms": 500, "tpot_ms": 200},
                    },
                )

            def evicted() -> bool:
                admin.post("/models/m/evict")
                return not any(
                    one["state"] == "ready" for one in admin.get("/instances").json()["instances"]
                )

            assert register("m").status_code == 201
            limits = Path(f"/proc/{system.process.pid}/limits").read_text()
            assert " 256 " not in next(
                line for line in limits.splitlines() if line.startswith("Max open files")
            )
            # Shared memory: a cold start cannot have its parameters there, and the answer says so.
            fillers = fill(inside(system.process.pid, SHARED_MEMORY))
            refused = ask()
            assert refused.status_code == 503
            assert "host_pool_full: /dev/shm is full" in refused.json()["error"]["message"]
            remove(fillers)
            until(lambda: ask().status_code == 200)
            # Disk: what is warm goes on, what must be written is refused.
            fillers = fill(inside(system.process.pid, disk))
            assert ask().status_code == 200
            refused = register("another")
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] in ("store_full", "database_full")
            assert "Make room" in refused.json()["error"]["what_to_do"]
            # No stream can be written any more, and nats-server would not write again by itself.
            log = system.home / "logs" / "nats-server.log"
            until(lambda: "no space left on device" in log.read_text())
            remove(fillers)
            until(lambda: register("another").status_code in (201, 409))
            until(evicted)
            until(lambda: ask().status_code == 200)
