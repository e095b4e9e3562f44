"""The admin API with its real database and bus, for tests, behind the same edge as in the gateway
but without a socket.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from fastapi import FastAPI
from sqlalchemy import URL, create_engine, text
from sqlalchemy.pool import NullPool
from starlette.applications import Starlette

from pilotlight.checkpoint.testing import tiny_config, tiny_files
from pilotlight.common.db.session import Database
from pilotlight.common.service import Context
from pilotlight.common.sources.opening import Sources
from pilotlight.common.sources.ranged import Patience
from pilotlight.gateway.admin.app import AdminParts, build_admin
from pilotlight.gateway.admin.drains import DrainRepository
from pilotlight.gateway.admin.live import LiveView
from pilotlight.gateway.admin.tenants import TenantParts
from pilotlight.gateway.auth import Authenticator
from pilotlight.gateway.edge.bodies import BodyBudget
from pilotlight.gateway.edge.http import Edge
from pilotlight.gateway.edge.measures import HttpMeasures
from pilotlight.gateway.edge.mounts import mounted
from pilotlight.gateway.models.catalog import Catalog
from pilotlight.gateway.models.registration import Registration
from pilotlight.gateway.records.audit import AuditLog
from pilotlight.gateway.records.display import Display
from pilotlight.gateway.records.recent import RecentReader
from pilotlight.gateway.records.usage_report import UsageReader
from pilotlight.gateway.serving.fleet import Fleet
from pilotlight.gateway.sessions import Sessions
from pilotlight.gateway.settings import GatewaySettings
from pilotlight.gateway.tenants.following import KeyFollower
from pilotlight.gateway.tenants.keys import KeyRepository
from pilotlight.gateway.tenants.projects import ProjectRepository
from pilotlight.gateway.testing import RESERVED_HELPERS
from pilotlight.gateway.texts.texts import Texts, build_texts
from pilotlight.text.testing import byte_level_json

ADMIN_KEY = "pl-admin-key-for-these-tests"
API_KEY = "pl-inference-key-for-these-tests"
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
VOCAB_SIZE = 512
SLO = {"ttft_ms": 1000, "tpot_ms": 50.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminWorld:
    """One gateway's admin API."""

    app: FastAPI
    audit: AuditLog
    fleet: Fleet
    http: httpx2.AsyncClient
    """Sends the admin key."""
    database: Database
    authenticator: Authenticator
    parts: AdminParts
    catalog: Catalog
    texts: Texts
    context: Context[GatewaySettings]
    models: Path
    """The only allowed root."""

    def body(self, folder: Path, name: str = "tiny", **changes: Any) -> dict[str, Any]:
        """A registration that is right but for the changes."""
        return {"name": name, "uri": folder.as_uri(), "slo": SLO, **changes}

    async def register(self, folder: Path, name: str = "tiny", **changes: Any) -> httpx2.Response:
        """Ask for a registration."""
        return await self.http.post("/models", json=self.body(folder, name, **changes))


def settings_in(folder: Path, database_url: str) -> GatewaySettings:
    """Settings of a gateway with the keys above and models below ``folder/models``."""
    (folder / "models").mkdir(exist_ok=True)
    files = {"key-pepper": "pepper", "admin.key": ADMIN_KEY, "api.key": API_KEY}
    for name, content in files.items():
        (folder / name).write_text(content)
    changes: dict[str, Any] = {
        "database_url": database_url,
        "secrets_dir": folder,
        "run_dir": folder,
        "admin_key_file": folder / "admin.key",
        "api_key_file": folder / "api.key",
        "model_roots": str(folder / "models"),
    }
    return GatewaySettings(**changes)


@asynccontextmanager
async def admin_world(context: Context[GatewaySettings]) -> AsyncGenerator[AdminWorld]:
    """Start what the admin API needs, and end it."""
    settings = context.settings
    database = Database(settings, "gateway", context.clock)
    authenticator = Authenticator(database, settings, settings, context.clock)
    await authenticator.start()
    texts = build_texts(context, RESERVED_HELPERS)
    await texts.start()
    catalog = Catalog(database, context, texts)
    registration = Registration(database, context, Sources(settings, Patience()), catalog, texts)
    fleet = Fleet(context.bus, context.clock, context.background)
    audit = AuditLog(database, context.clock, context.background, context.metrics)
    await audit.start()
    sessions = Sessions(authenticator, context.clock)
    recent = RecentReader(database, context.clock)
    live = LiveView(fleet, catalog, recent, context.background)
    keys = KeyRepository(database, context.clock)
    follower = KeyFollower(context, keys, authenticator)
    await follower.start()
    await live.start()
    parts = AdminParts(
        sessions=sessions,
        registration=registration,
        fleet=fleet,
        bus=context.bus,
        audit=audit,
        drains=DrainRepository(database, context.clock),
        display=Display(database),
        recent=recent,
        live=live,
        tenants=TenantParts(
            authenticator=authenticator,
            keys=keys,
            projects=ProjectRepository(database, context.clock),
            usage=UsageReader(database, context.clock),
        ),
    )
    app = build_admin(parts)
    bodies = BodyBudget(settings.bodies_bytes, settings.body_pause_s)
    routed = Starlette(routes=[mounted("/admin/v1", app)])
    edge = Edge(routed, (), (), bodies, HttpMeasures(context.metrics, bodies))
    http = httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app=edge),
        base_url="http://gateway/admin/v1",
        headers={"authorization": f"Bearer {ADMIN_KEY}"},
    )
    try:
        yield AdminWorld(
            app=app,
            audit=audit,
            fleet=fleet,
            http=http,
            database=database,
            authenticator=authenticator,
            parts=parts,
            catalog=catalog,
            texts=texts,
            context=context,
            models=Path(settings.model_roots),
        )
    finally:
        await http.aclose()
        await live.stop()
        await follower.stop()
        await audit.stop()
        await catalog.stop()
        await texts.stop()
        await database.stop()


def checkpoint_files(**changes: Any) -> dict[str, bytes]:
    """A whole checkpoint that can be registered; ``changes`` are to its configuration."""
    files = tiny_files({**tiny_config(vocab_size=VOCAB_SIZE), **changes})
    files["tokenizer.json"] = byte_level_json().encode()
    files["tokenizer_config.json"] = json.dumps(
        {"chat_template": CHAT_TEMPLATE, "eos_token": "</s>"}
    ).encode()
    return files


def write_folder(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Write files into a new folder."""
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


@contextmanager
def database_away(url: URL) -> Generator[None]:
    """Let a database refuse connections, and cut those that there are."""
    engine = create_engine(
        url.set(database="postgres"), poolclass=NullPool, isolation_level="AUTOCOMMIT"
    )
    with engine.connect() as connection:
        connection.execute(text(f"ALTER DATABASE {url.database} WITH ALLOW_CONNECTIONS false"))
        connection.execute(
            text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name"),
            {"name": url.database},
        )
        try:
            yield
        finally:
            connection.execute(text(f"ALTER DATABASE {url.database} WITH ALLOW_CONNECTIONS true"))
            engine.dispose()


def emptied(url: URL) -> None:
    """Delete what an earlier test left in the gateway's tables."""
    engine = create_engine(url, poolclass=NullPool)
    with engine.begin() as connection:
        connection.execute(
            text(
                "TRUNCATE gateway.models, gateway.api_keys, gateway.usage, gateway.spans, gateway.audit, gateway.drains, gateway.outbox, "
                "gateway.start_costs, gateway.start_holds, gateway.idle_times, gateway.attainment"
            )
        )
    engine.dispose()


def refused(answer: httpx2.Response, status: int, code: str, *words: str) -> None:
    """An answer is this refusal, says these words, and says what to do."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == code, error
    for word in words:
        assert word in error["message"], error
    assert error["what_to_do"]
    assert "Traceback" not in answer.text


async def nothing_is_registered(world: AdminWorld) -> None:
    """No model is: neither in the database nor in the catalog."""
    async with asyncio.timeout(5):
        assert (await world.http.get("/models")).json() == {"models": []}
    assert world.catalog.names() == ()
