"""Every NATS user, against every subject of every edge: what is not listed is refused by the real
server.
"""

import asyncio
import re
import socket
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from pilotlight.cli.embedded import NatsServer
from pilotlight.common.buckets import HEALTH, INSTANCES
from pilotlight.common.errors import BusUnavailable, DeadlineExceeded
from pilotlight.common.messages.codec import Message
from pilotlight.common.messages.demand import WARM_SUBJECT
from pilotlight.common.messages.events import Event, event_subject
from pilotlight.common.nats_bus import NatsBus
from pilotlight.common.natsconf import (
    ADMIN,
    BUCKETS,
    RIGHTS,
    StreamSettings,
    allowed_publish,
    allowed_subscribe,
    ensure_streams,
    server_config,
)
from pilotlight.common.settings import BusSettings

pytestmark = pytest.mark.anyio
DEADLINE_S = 10.0
FOREIGN = (
    "v1.unknown",
    "v2.scheduler.warm",
    "$SYS.REQ.SERVER.PING",
    "$JS.API.STREAM.CREATE.OTHER",
    "$JS.API.STREAM.UPDATE.EVENTS",
    "$JS.API.STREAM.DELETE.EVENTS",
    "$JS.API.STREAM.PURGE.KV_instances",
    "$JS.API.STREAM.MSG.DELETE.KV_instances",
    "$JS.API.CONSUMER.CREATE.EVENTS",
    "_INBOX.other.x",
)


class Note(Message, frozen=True, kw_only=True):
    text: str = ""


@pytest.fixture(scope="module")
def secrets_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nats-secrets")
    for user in (ADMIN, *RIGHTS):
        (folder / f"nats-{user}").write_text(f"password of {user}\n")
    return folder


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, secrets_dir: Path) -> Iterator[BusSettings]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    passwords = {user: f"password of {user}" for user in (ADMIN, *RIGHTS)}
    server = NatsServer(tmp_path_factory.mktemp("nats-guarded"), port, server_config(passwords))
    asyncio.run(server.start())
    try:
        settings = StreamSettings(
            nats_url=server.url, secrets_dir=secrets_dir, events_bytes=1 << 20
        )
        asyncio.run(ensure_streams(settings))
        asyncio.run(ensure_streams(settings))
        yield settings
    finally:
        asyncio.run(server.stop())


class Raw:
    """A bare client, which hears what the server refuses (nats-py gives it in lower case)."""

    def __init__(self) -> None:
        self.client = Client()
        self.refused: set[str] = set()

    async def all_refused(self, expected: set[str]) -> bool:
        """Whether exactly these are refused, once the server has answered to everything that was
        sent.
        """
        async with asyncio.timeout(DEADLINE_S):
            while len(self.refused) < len(expected):
                await self.client.flush(timeout=5)
        await self.client.flush(timeout=5)
        return self.refused == {subject.lower() for subject in expected}

    async def on_error(self, error: Exception) -> None:
        found = re.search(
            r'permissions violation for (?:publish|subscription) to "(.*?)"',
            str(error),
            re.IGNORECASE,
        )
        if found:
            self.refused.add(found.group(1))


@pytest.fixture
async def raw(guarded: BusSettings, anyio_backend: str, user: str) -> AsyncGenerator[Raw]:
    made = Raw()
    await made.client.connect(
        guarded.nats_url,
        user=user,
        password=guarded.password_of(user),
        inbox_prefix=f"_INBOX.{user}",
        error_cb=made.on_error,
    )
    yield made
    await made.client.close()


def matches(pattern: str, subject: str) -> bool:
    wanted, given = pattern.split("."), subject.split(".")
    for index, token in enumerate(wanted):
        if token == ">":
            return len(given) > index
        if index >= len(given) or token not in ("*", given[index]):
            return False
    return len(wanted) == len(given)


def concrete(pattern: str) -> str:
    return ".".join("x" if token in ("*", ">") else token for token in pattern.split("."))


def universe() -> list[str]:
    found = [
        concrete(pattern)
        for user in RIGHTS
        for pattern in (*allowed_publish(user), *allowed_subscribe(user))
    ]
    return sorted({*found, *(f"$KV.{name}.x" for name in BUCKETS), *FOREIGN})


@pytest.mark.parametrize("user", RIGHTS)
async def test_every_forbidden_publish_is_refused(raw: Raw, user: str) -> None:
    allowed = allowed_publish(user)
    expected = {
        subject
        for subject in universe()
        if not any(matches(pattern, subject) for pattern in allowed)
    }
    for subject in universe():
        await raw.client.publish(subject, b"{}")
    assert await raw.all_refused(expected), raw.refused
    assert len(expected) > 25


@pytest.mark.parametrize("user", RIGHTS)
async def test_every_forbidden_subscribe_is_refused(raw: Raw, user: str) -> None:
    async def ignore(_: Msg) -> None: ...

    allowed = allowed_subscribe(user)
    subjects = [*universe(), ">", "v1.>", "_INBOX.>", "v1.*.*"]
    for subject in subjects:
        await raw.client.subscribe(subject, cb=ignore)
    expected = {
        subject for subject in subjects if not any(matches(pattern, subject) for pattern in allowed)
    }
    assert await raw.all_refused(expected), raw.refused


def test_each_edge_has_the_writers_that_its_messages_name() -> None:
    def writers(subject: str) -> set[str]:
        return {
            user
            for user in RIGHTS
            if any(matches(pattern, subject) for pattern in allowed_publish(user))
        }

    def readers(subject: str) -> set[str]:
        return {
            user
            for user in RIGHTS
            if any(matches(pattern, subject) for pattern in allowed_subscribe(user))
        }

    assert writers("v1.worker.w.hold") == {"scheduler"}
    assert writers("v1.loader.n.hold") == {"scheduler"}
    assert writers("v1.loader.n.verify") == writers("v1.loader.n.verification") == {"gateway"}
    assert writers("v1.worker.w.submit") == {"gateway"}
    assert writers("v1.worker.w.give-up") == {"cache"}
    assert writers("v1.cache.reserve") == {"scheduler"}
    assert writers("v1.tokens.gw") == {"worker"}
    assert writers("v1.report.worker.w") == {"worker"}
    assert writers("v1.report.loader.n") == {"loader"}
    assert writers("v1.demand.gw") == {"gateway"}
    assert writers("v1.arrivals.gw") == {"gateway"}
    assert readers("v1.arrivals.gw") == {"scheduler", "cache"}
    assert writers("v1.scheduler.phases") == {"gateway", "loader", "worker"}
    for user in RIGHTS:
        assert writers(f"v1.event.{user}.happened") == {user}
    owners = {
        name: [user for user, rights in RIGHTS.items() if name in rights.write] for name in BUCKETS
    }
    assert owners == {
        "gateways": ["gateway"],
        "instances": ["scheduler"],
        "copies": ["cache"],
        "nodes": ["loader"],
        "workers": ["worker"],
        "leader": ["scheduler"],
        "health": [],
    }
    for user in RIGHTS:
        assert writers(f"$KV.health.{user}") == {user}


async def test_services_can_do_their_work(guarded: BusSettings) -> None:
    buses = {user: await NatsBus.connect(guarded, user=user, name=user) for user in RIGHTS}
    changes: asyncio.Queue[tuple[str, str, Note | None]] = asyncio.Queue()
    watching: list[asyncio.Task[None]] = []
    for user, rights in RIGHTS.items():
        for name in rights.read:

            async def on_change(
                key: str, value: Note | None, place: tuple[str, str] = (user, name)
            ) -> None:
                # Others have written into the bucket of health before.
                of_health = place[1] == HEALTH and value == Note(text=HEALTH)
                if key == "ready" or (of_health and key == place[0]):
                    changes.put_nowait((*place, value))

            bucket = await buses[user].bucket(name)
            watching.append(asyncio.create_task(bucket.watch(Note, on_change)))
        for name in rights.write:
            await (await buses[user].bucket(name)).put("ready", Note(text=name))
        await (await buses[user].bucket(HEALTH)).put(user, Note(text=HEALTH))
        event = Event(
            event_id=f"ev-{user}", kind="started", entity=user, at="2026-01-01T00:00:00+00:00"
        )
        await buses[user].publish_event(event_subject(user, "started"), event.event_id, event)
    expected = {(user, name) for user, rights in RIGHTS.items() for name in rights.read}
    seen: set[tuple[str, str]] = set()
    while seen != expected:
        user, name, value = await asyncio.wait_for(changes.get(), DEADLINE_S)
        assert value == Note(text=name)
        seen.add((user, name))

    async def warm(request: Note) -> Note:
        return request

    await buses["scheduler"].serve(WARM_SUBJECT, Note, warm)
    assert await buses["gateway"].request(
        WARM_SUBJECT, Note(text="m"), Note, deadline_s=DEADLINE_S
    ) == Note(text="m")
    with pytest.raises((DeadlineExceeded, BusUnavailable)):
        await buses["worker"].request(WARM_SUBJECT, Note(text="m"), Note, deadline_s=0.1)
    for task in watching:
        task.cancel()
    await asyncio.wait(watching)
    for bus in buses.values():
        await bus.close()


async def test_a_reader_cannot_write(guarded: BusSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pilotlight.common.buckets.DEADLINE_S", 0.1)
    bus = await NatsBus.connect(guarded, user="gateway", name="gateway")
    bucket = await bus.bucket(INSTANCES)
    with pytest.raises(BusUnavailable):
        await bucket.put("x", Note())
    await bus.close()


@pytest.mark.parametrize("password", ["wrong", None])
async def test_a_wrong_password_is_told_at_once(
    guarded: BusSettings, tmp_path: Path, password: str | None
) -> None:
    if password:
        (tmp_path / "nats-gateway").write_text(password)
    started_s = asyncio.get_running_loop().time()
    with pytest.raises(BusUnavailable, match="gateway"):
        await NatsBus.connect(
            guarded.model_copy(update={"secrets_dir": tmp_path}), user="gateway", name="x"
        )
    assert asyncio.get_running_loop().time() - started_s < 2.0
