"""Jobs of a model wait for a text helper that holds its bundle, and others are given it meanwhile.

A helper that a test has stopped is busy for as long as the test likes.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from pilotlight.common.errors import NotFound, TextUnavailable
from pilotlight.common.testing import MakeContext, until
from pilotlight.common.waiting import pause
from pilotlight.gateway.schema.requests import ChatRequest
from pilotlight.gateway.settings import GatewaySettings
from pilotlight.gateway.testing import RESERVED_HELPERS
from pilotlight.gateway.texts import holders
from pilotlight.gateway.texts.frames import Chat, Conversation, Reply
from pilotlight.gateway.texts.pool import HelperPool
from pilotlight.gateway.texts.process import HelperProcess
from pilotlight.gateway.texts.strikes import MAX_STRIKES, WINDOW_S
from pilotlight.gateway.texts.texts import build_texts
from pilotlight.policy.ids import Digest
from pilotlight.text.bundle import TextBundle, encode
from pilotlight.text.testing import byte_level_json

TEMPLATE = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
LONG = "x" * 40_000


class World:
    """Text helpers, three at work at most, and bundles that no helper has met before."""

    def __init__(self, context: Any) -> None:
        self.texts = build_texts(context, RESERVED_HELPERS)
        self.pool: HelperPool = self.texts._pool
        self.texts._bundles._fetch = self._fetch
        self.bundles: dict[str, bytes] = {}
        self.comes = asyncio.Event()
        """Bundles do, that are asked for."""
        self.comes.set()
        self.asked: list[Digest] = []
        self.model = self.add()

    def add(self) -> Digest:
        """A new model."""
        bundle = TextBundle(
            tokenizer_json=byte_level_json(),
            chat_template=TEMPLATE + f"{{# {uuid4()} #}}",
            special_tokens={"eos_token": "</s>"},
        )
        self.bundles[bundle.digest()] = encode(bundle)
        return bundle.digest()

    async def _fetch(self, digest: Digest) -> bytes:
        self.asked.append(digest)
        await self.comes.wait()
        if digest not in self.bundles:
            raise NotFound("no such bundle")
        return self.bundles[digest]

    def forget(self) -> None:
        """The gateway has to fetch bundles again."""
        self.texts._bundles._kept.clear()
        self.asked.clear()

    def encode(
        self, owner: str, content: str = "hello", model: Digest | None = None
    ) -> asyncio.Task[list[int]]:
        job = Chat(
            digest=model or self.model,
            model="fox",
            context_tokens=1_000_000,
            conversation=Conversation([{"role": "user", "content": content}], None),
        )
        return asyncio.create_task(self.texts.encode(job, owner))

    def helpers(self) -> list[HelperProcess]:
        return [*self.pool._idle, *(each.helper for each in self.pool._running.values())]

    def holding(self) -> list[HelperProcess]:
        return [one for one in self.helpers() if self.model in one.held]

    def loading(self) -> list[HelperProcess]:
        running = self.pool._running.values()
        return [each.helper for each in running if each.jobs[0].kind == holders.LOADING]

    async def first_use(self) -> HelperProcess:
        """The only helper that holds the model's bundle."""
        await until(lambda: len(self.pool._idle) == 4)
        assert await self.encode("one")
        (holder,) = self.holding()
        self.forget()
        return holder

    async def occupy(self, content: str = "hello") -> asyncio.Task[list[int]]:
        """The only holder, which is stopped, has a job."""
        job = self.encode("one", content)
        await until(lambda: self.pool._running)
        assert [each.helper for each in self.pool._running.values()] == self.holding()
        return job


@pytest.fixture
async def world(make_context: MakeContext, tmp_path: Path) -> AsyncIterator[World]:
    settings = GatewaySettings(run_dir=tmp_path, text_helpers=3, text_short_timeout_s=100.0)
    context = make_context("gateway", settings)
    made = World(context)
    await made.texts.start()
    yield made
    await made.texts.stop()
    assert not context.background._tasks
    assert not context.background.failed.done()


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[HelperProcess, str]]:
    """Who has answered whose jobs."""
    seen: list[tuple[HelperProcess, str]] = []
    note = holders.Holders.note

    def notes(self: Any, helper: HelperProcess, job: Any, reply: Reply) -> None:
        note(self, helper, job, reply)
        seen.append((helper, job.lane.owner))

    monkeypatch.setattr(holders.Holders, "note", notes)
    return seen


@contextmanager
def stopped(helpers: Iterable[HelperProcess]) -> Iterator[None]:
    """They do nothing meanwhile."""
    processes = [one.launched.process for one in helpers]
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)


async def test_a_job_waits_for_the_helper_that_holds_its_bundle(world, answers):
    """And for no load, which takes a hundred times as long as to wait."""
    holder = await world.first_use()
    answers.clear()
    world.comes.clear()
    with stopped([holder]):
        jobs = [await world.occupy(), world.encode("another")]
        await until(lambda: world.asked)
        assert len(world.pool._running) == len(world.pool._waiting) == 1
    assert all(await asyncio.gather(*jobs))
    assert answers == [(holder, "one"), (holder, "another")]
    # What was begun for it is done for those that come later.
    assert world.holding() == [holder]
    world.comes.set()
    await until(lambda: len(world.holding()) == 2)
    assert world.asked == [world.model]


async def test_other_jobs_do_not_wait(world, answers):
    """Those of other models, and those of none."""
    holder = await world.first_use()
    other = world.add()
    assert await world.encode("one", model=other)
    world.forget()
    world.comes.clear()
    with stopped([holder]):
        jobs = [await world.occupy(), world.encode("another")]
        await until(lambda: world.asked)
        answers.clear()
        assert await world.encode("third", model=other)
        body = b'{"model":"fox","messages":[{"role":"user","content":"hello"}]}'
        assert (await world.texts.read(body, ChatRequest, "fourth")).model == "fox"
        assert [owner for _, owner in answers] == ["third", "fourth"]
        assert not any(job.done() for job in jobs)
    assert all(await asyncio.gather(*jobs))


async def test_short_jobs_do_not_wait_for_a_long_one(world, answers):
    """Another helper is given the bundle for them."""
    holder = await world.first_use()
    answers.clear()
    with stopped([holder]):
        long = await world.occupy(LONG)
        assert await world.encode("another")
        assert not long.done()
        loaded, helper = (helper for helper, _ in answers)
        assert loaded is helper is not holder
    assert await long


async def test_short_jobs_do_not_wait_for_a_long_one_that_brings_the_bundle(world):
    """They wait for a load, as it does."""
    await until(lambda: len(world.pool._idle) == 4)
    world.comes.clear()
    long = world.encode("one", LONG)
    await until(lambda: world.asked and not world.pool._running)
    with stopped(world.helpers()):
        world.comes.set()
        await until(lambda: any(each.jobs[0].give for each in world.pool._running.values()))
        short = world.encode("another")
        await until(world.loading)
        (loading,) = world.loading()
        loading.launched.process.send_signal(signal.SIGCONT)
        assert await short
        assert not long.done()
    assert await long


@pytest.mark.parametrize("bundle", [None, b"no bundle"], ids=["not there", "not to be loaded"])
async def test_a_bundle_that_cannot_be_given_harms_nobody(world, bundle):
    """And is tried again after a rest."""
    holder = await world.first_use()
    whole = world.bundles.pop(world.model)
    if bundle is not None:
        world.bundles[world.model] = bundle
    with stopped([holder]):
        jobs = [await world.occupy(), world.encode("another")]
        await until(lambda: world.pool._holders._rests)
        for _ in range(100):
            await pause(0)
            world.pool._begin_soon()
        assert world.asked == [world.model]
        assert not any(job.done() for job in jobs)
        assert world.holding() == [holder]
        world.bundles[world.model] = whole
        world.forget()
        world.pool._holders._rests.clear()
        # Nothing else happens, but that what waits is looked at.
        assert await jobs[1]
        assert not jobs[0].done()
    assert await jobs[0]
    assert len(world.holding()) == 2


@pytest.mark.parametrize(
    ("number", "strikes"), [(signal.SIGKILL, 0), (signal.SIGSEGV, 1)], ids=["from outside", "crash"]
)
async def test_a_helper_that_is_lost_over_a_bundle_harms_nobody(world, number, strikes):
    holder = await world.first_use()
    others = [one for one in world.helpers() if one is not holder]
    with stopped([holder]):
        with stopped(others):
            jobs = [await world.occupy(), world.encode("another")]
            await until(world.loading)
            (loading,) = world.loading()
            assert loading in others
            loading.launched.process.send_signal(number)
            loading.launched.process.send_signal(signal.SIGCONT)
            await until(lambda: world.pool._holders._rests)
        assert len(world.texts._strikes._times_s.get(world.model, ())) == strikes
        # Replaced, as one that a job has ended.
        await until(lambda: len(world.helpers()) == 4)
        assert loading not in world.helpers()
        assert not any(job.done() for job in jobs)
    assert all(await asyncio.gather(*jobs))


def test_loading_alone_has_no_model_refused():
    """The strike before the last one is forgotten when the next is due."""
    assert (MAX_STRIKES - 1) * holders.LOAD_REST_S >= WINDOW_S


@pytest.mark.parametrize("comes", [False, True], ids=["fetched", "given"])
async def test_a_gateway_stops_while_a_bundle_is(world, comes):
    holder = await world.first_use()
    if not comes:
        world.comes.clear()
    helpers = world.helpers()
    with stopped(helpers):
        jobs = [await world.occupy(), world.encode("another")]
        await until(world.loading if comes else lambda: world.asked)
        ended = [holder, *world.loading()]
        await world.texts.stop()
        found = await asyncio.gather(*jobs, return_exceptions=True)
        assert {type(error) for error in found} == {TextUnavailable}
        assert not world.pool._holders._tasks
        assert not world.pool._running
        assert all(one.launched.process.poll() == -signal.SIGKILL for one in ended)


async def test_many_first_jobs_have_the_bundle_loaded_once(world, monkeypatch):
    """For all of them; others are given it later, one at a time."""
    given: list[tuple[str, HelperProcess]] = []
    begin = HelperPool._begin

    def begins(self: HelperPool, jobs: list[Any], helper: HelperProcess) -> None:
        if jobs[0].give is not None and world.model not in helper.held:
            assert not any(
                each.jobs[0].give is not None and world.model not in each.helper.held
                for each in self._running.values()
            )
            given.append((jobs[0].kind, helper))
        begin(self, jobs, helper)

    monkeypatch.setattr(HelperPool, "_begin", begins)
    await until(lambda: len(world.pool._idle) == 4)
    assert all(await asyncio.gather(*(world.encode(f"{number % 5}") for number in range(40))))
    kinds = [kind for kind, _ in given]
    assert kinds == ["chat", *[holders.LOADING] * (len(kinds) - 1)]
    assert len({id(helper) for _, helper in given}) == len(given)


async def test_a_job_without_a_model_leaves_holders_to_others(world, answers):
    """They would have to wait."""
    holder = await world.first_use()
    assert world.pool._idle[-1] is holder
    answers.clear()
    body = b'{"model":"fox","messages":[{"role":"user","content":"hello"}]}'
    await world.texts.read(body, ChatRequest, "one")
    ((helper, _),) = answers
    assert helper is not holder
