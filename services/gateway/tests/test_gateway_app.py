"""The gateway as it is put together, with its database: keys, models, requests, usage."""

from dataclasses import replace

import httpx2
import pytest
from sqlalchemy import select

from pilotlight.common.clock import SystemClock
from pilotlight.common.db import tables
from pilotlight.common.db.session import Database
from pilotlight.common.store import text_key
from pilotlight.gateway.app import OPEN_PATHS, build
from pilotlight.gateway.edge.server import HttpServer
from pilotlight.gateway.models.repository import ModelRepository
from pilotlight.gateway.serving.testing import ScriptedWorker, entries_of
from pilotlight.gateway.settings import GatewaySettings
from pilotlight.gateway.testing import model_of
from pilotlight.policy.ids import ModelName
from pilotlight.text.bundle import encode
from pilotlight.text.tokenizer import TextTokenizer

pytestmark = pytest.mark.anyio

KEY = "pl-inference-0123456789abcdef"
ADMIN = "pl-admin-0123456789abcdef"


@pytest.fixture
def settings(database_settings, tmp_path):
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (secrets / "key-pepper").write_text("pepper")
    (tmp_path / "api.key").write_text(KEY)
    (tmp_path / "admin.key").write_text(ADMIN)
    return GatewaySettings(
        database_url=database_settings("gateway").database_url,
        secrets_dir=secrets,
        run_dir=tmp_path,
        port=0,
        drain_s=1.0,
        api_key_file=tmp_path / "api.key",
        admin_key_file=tmp_path / "admin.key",
    )


async def test_whole_gateway(make_context, settings, bundle, bus):
    context = make_context("gateway", settings)
    clock = SystemClock()
    tokenizer = TextTokenizer(bundle)
    model = replace(
        model_of("org/fox", vocab_size=tokenizer.vocab_size), text_digest=bundle.digest()
    )
    await context.store.put_if_absent(text_key(bundle.digest()), encode(bundle))
    database = Database(settings, "gateway", clock)
    await ModelRepository(database, clock).add(model)
    application = await build(context)
    for component in application.components:
        await component.start()
    assert application.ready() is None
    (server,) = [
        component for component in application.components if isinstance(component, HttpServer)
    ]
    worker = ScriptedWorker(
        bus,
        "w0",
        "inst-0",
        model,
        lambda submit: entries_of(submit, tokenizer.encode("hello", add_special_tokens=False)),
    )
    await worker.start()
    await worker.ready()
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=30) as http:
        for path in sorted(OPEN_PATHS):
            assert (await http.get(path)).status_code == 200, path
        assert (await http.get("/admin/v1/models")).status_code == 401
        assert (await http.get("/v1/models")).status_code == 401
        http.headers["authorization"] = f"Bearer {ADMIN}"
        assert (await http.get("/v1/models")).status_code == 403
        workers = (await http.get("/admin/v1/workers")).json()["workers"]
        assert [worker["worker_id"] for worker in workers] == ["w0"]
        http.headers["authorization"] = f"Bearer {KEY}"
        assert (await http.get("/v1/models/org/fox")).json()["id"] == "org/fox"
        body = {"model": ModelName("org/fox"), "messages": [{"role": "user", "content": "hi"}]}
        answer = (await http.post("/v1/chat/completions", json=body)).json()
        assert answer["choices"][0]["message"]["content"] == "hello"
        asked = {"model": "org/fox", "input": "hi", "store": True}
        response = (await http.post("/v1/responses", json=asked)).json()
        assert response["store"] is True
        kept = (await http.get(f"/v1/responses/{response['id']}")).json()
        assert kept == response
    await worker.die()
    for component in reversed(application.components):
        await component.stop()
    async with database.reading() as connection:
        row, other = (await connection.execute(select(tables.usage))).all()
    assert other.status == "ok"
    assert (row.model, row.status, row.output_tokens) == (
        "org/fox",
        "ok",
        answer["usage"]["completion_tokens"],
    )
    await database.stop()
