"""A whole system behind a door that resets every connection to NATS right after the greeting."""

import json
import os
import tempfile
from pathlib import Path

import httpx2
import pytest
from embedded_system import eventually, free_port, running
from resetting_server import Door

from pilotlight.cli.embedded import NatsServer
from pilotlight.common.clock import SystemClock
from pilotlight.common.natsconf import server_config

pytestmark = [pytest.mark.hostile, pytest.mark.anyio]

RESETS = 300
WHOLE_WITHIN_S = 60.0
WORDS = {"model": "ember-7m", "prompt": "Once", "max_tokens": 4}


async def test_every_service_is_back_after_resets() -> None:
    with tempfile.TemporaryDirectory(prefix="pilotlight-hostile-") as folder:
        os.chmod(folder, 0o711)
        nats = NatsServer(Path(folder) / "nats", free_port(), server_config({}))
        await nats.start()
        door = Door(nats.port)
        try:
            _reset_and_ask(Path(folder) / "home", door)
        finally:
            door.close()
            await nats.stop()


def _reset_and_ask(home: Path, door: Door) -> None:
    clock = SystemClock()
    through = {"PILOTLIGHT_NATS_URL": f"nats://127.0.0.1:{door.port}"}
    with (
        running(
            home, "--worker-kind", "sim", "--workers", "2", "--with-demo-model", environment=through
        ) as system,
        system.admin() as admin,
        httpx2.Client(
            headers={"Authorization": f"Bearer {system.key('api')}"}, timeout=WHOLE_WITHIN_S
        ) as http,
    ):

        def not_ready() -> dict[str, str]:
            """Of each process that says so, why."""
            found: dict[str, str] = {}
            for path in (home / "run").glob("*-*.sock"):
                transport = httpx2.HTTPTransport(uds=str(path))
                try:
                    with httpx2.Client(transport=transport, timeout=5.0) as asked:
                        answer = asked.get("http://local/readyz")
                except httpx2.HTTPError:
                    continue
                if answer.status_code == 503:
                    found[path.name] = answer.text
            return found

        def served() -> bool:
            return http.post(f"{system.url}/v1/completions", json=WORDS).status_code == 200

        eventually(lambda: served() and not not_ready(), WHOLE_WITHIN_S)
        door.shut()
        eventually(lambda: door.resets >= RESETS and not_ready(), WHOLE_WITHIN_S)
        door.open()
        opened_s = clock.monotonic_s()
        eventually(lambda: not not_ready(), WHOLE_WITHIN_S)
        whole_s = clock.monotonic_s() - opened_s
        admin.post("/models/ember-7m/evict").raise_for_status()
        eventually(served, WHOLE_WITHIN_S)
        print(json.dumps({"resets": door.resets, "connected_after_s": round(whole_s, 1)}))
