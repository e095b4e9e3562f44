"""Batches on a real database and a real bus: what becomes of lines, whatever becomes of
gateways.
"""

import asyncio
import json
import struct
from datetime import timedelta

import openai
import pytest
from openai.types import CreateEmbeddingResponse
from sqlalchemy import delete, func, update

from pilotlight.common.clock import SystemClock
from pilotlight.common.db import tables
from pilotlight.common.db.session import Database
from pilotlight.common.messages.tokens import TokenEntry
from pilotlight.common.testing import until
from pilotlight.gateway.batches import runner as runner_module
from pilotlight.gateway.batches.repository import BatchRepository, LeaseLost, Line
from pilotlight.gateway.schema.batches import BatchRequest
from pilotlight.gateway.serving.testing import entries_of
from pilotlight.policy.access import KeyScope
from pilotlight.policy.pooling import Pooling, PoolingMode
from pilotlight.policy.request import FinishReason

pytestmark = pytest.mark.anyio

KEY = "key-inference"
CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
WAIT_S = 30.0


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """What is looked at now and then is looked at often."""
    monkeypatch.setattr(runner_module, "LOOK_S", 0.02)
    monkeypatch.setattr(runner_module, "RENEW_S", 0.05)
    monkeypatch.setattr(runner_module, "AGAIN_S", 0.01)


@pytest.fixture
async def database(database_settings):
    database = Database(database_settings("gateway"), "gateway", SystemClock())
    yield database
    async with database.unit_of_work() as work:
        for table in (tables.files, tables.batches, tables.batch_lines):
            await work.connection.execute(delete(table))
    await database.stop()


@pytest.fixture
async def batching(database, make_world):
    return await make_world(database=database)


def line(number, model="fox", **changes):
    body = {"model": model, "messages": [{"role": "user", "content": f"line {number}"}]}
    asked = {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": body}
    return json.dumps({**asked, **changes})


async def submitted(world, *lines):
    content = "\n".join(lines).encode()
    file = await world.client.files.create(file=("in.jsonl", content), purpose="batch")
    return await world.client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"of": "a test"}
    )


async def reaches(world, batch_id, *statuses):
    found = None

    async def there():
        nonlocal found
        found = await world.client.batches.retrieve(batch_id)
        return found.status in statuses

    await until(there, deadline_s=WAIT_S)
    return found


async def results(world, file_id):
    content = await world.client.files.content(file_id)
    return [json.loads(one) for one in content.text.splitlines()]


def held_back(world, worker):
    """A script that answers no line before it is let go."""
    answer = world.ids("The quick brown fox")
    worker.script = lambda submit: []
    return lambda: setattr(worker, "script", lambda submit: entries_of(submit, answer))


async def test_a_batch_is_answered_in_the_order_of_its_file(batching):
    worker = await batching.worker()
    lines = [line(number, "fox" if number != 2 else "nobody") for number in range(5)]
    batch = await submitted(batching, *lines)
    assert (batch.status, batch.metadata) == ("validating", {"of": "a test"})
    batch = await reaches(batching, batch.id, *ENDED)
    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (5, 4, 1)
    output = await results(batching, batch.output_file_id)
    assert [one["custom_id"] for one in output] == ["line-0", "line-1", "line-3", "line-4"]
    for one in output:
        assert one["response"]["status_code"] == 200
        assert one["response"]["body"]["choices"][0]["message"]["content"]
    (failure,) = await results(batching, batch.error_file_id)
    assert failure["custom_id"] == "line-2"
    assert failure["response"]["status_code"] == 404
    assert failure["response"]["body"]["error"]["code"] == "model_not_found"
    assert len(worker.submits) == 4
    assert {row["key_id"] for row in batching.usage.rows} == {KEY}
    listed = await batching.client.batches.list(limit=1)
    assert [one.id for one in listed.data] == [batch.id]
    names = {one.filename async for one in batching.client.files.list()}
    assert names == {"in.jsonl", f"{batch.id}_output.jsonl", f"{batch.id}_error.jsonl"}


@pytest.mark.parametrize(
    ("scope", "revoked", "told"),
    [
        (KeyScope(models=("elsewhere",)), False, "model_not_found"),
        (KeyScope(routes=("/v1/batches",)), False, "forbidden"),
        (KeyScope(), True, "invalid_api_key"),
    ],
)
async def test_lines_do_what_their_key_may_when_they_run(batching, scope, revoked, told):
    worker = await batching.worker()
    batching.keys.scope, batching.keys.revoked = scope, revoked
    batch = await submitted(batching, line(0))
    batch = await reaches(batching, batch.id, *ENDED)
    (failure,) = await results(batching, batch.error_file_id)
    assert failure["response"]["body"]["error"]["code"] == told
    assert not worker.submits


async def test_a_file_that_is_no_batch_names_its_lines(batching):
    lines = [line(0), "no json", line(0), line(1, url="/v1/completions"), line(2, method="GET")]
    batch = await reaches(batching, (await submitted(batching, *lines)).id, *ENDED)
    assert batch.status == "failed"
    found = {(error.line, error.code) for error in batch.errors.data}
    assert found == {
        (2, "invalid_line"),
        (3, "duplicate_custom_id"),
        (4, "mismatched_url"),
        (5, "invalid_line"),
    }
    empty = await submitted(batching, "", "  ")
    assert (await reaches(batching, empty.id, *ENDED)).errors.data[0].code == "empty_file"


async def test_a_deleted_file_fails_its_batch(batching):
    await batching.batches.runner.stop()
    batch = await submitted(batching, line(0))
    await batching.client.files.delete(batch.input_file_id)
    await batching.batches.runner.start()
    batch = await reaches(batching, batch.id, *ENDED)
    assert (batch.status, batch.errors.data[0].code) == ("failed", "file_missing")


async def test_another_gateway_goes_on_and_no_line_has_two_results(database, make_world):
    first, second = await make_world(database=database), await make_world(database=database)
    await second.batches.runner.stop()
    worker = await first.worker()
    script, go_on = worker.script, held_back(first, worker)
    taken = []

    def two(submit):
        taken.append(submit)
        return script(submit) if len(taken) <= 2 else []

    worker.script = two
    batch = await submitted(first, *(line(number) for number in range(6)))
    repository = first.batches.routes.batches

    async def two_kept():
        return len(await repository.known(batch.id)) == 2

    await until(two_kept, deadline_s=WAIT_S)
    await first.batches.runner.stop()
    before = len(worker.submits)
    go_on()
    # Files are one store to both, as they are in a cluster.
    key = f"files/{batch.input_file_id}"
    await second.store.put_if_absent(key, await first.store.get(key))
    await second.batches.runner.start()
    batch = await reaches(second, batch.id, *ENDED)
    assert (batch.status, batch.request_counts.completed) == ("completed", 6)
    output = await results(second, batch.output_file_id)
    assert [one["custom_id"] for one in output] == [f"line-{number}" for number in range(6)]
    assert len(worker.submits) - before == 4, "what was kept does not run again"


async def test_a_cancelled_batch_keeps_what_it_has(batching):
    worker = await batching.worker()
    held_back(batching, worker)
    batch = await submitted(batching, *(line(number) for number in range(3)))
    await until(lambda: len(worker.submits) == 3, deadline_s=WAIT_S)
    asked = await batching.client.batches.cancel(batch.id)
    assert asked.status == "cancelling"
    batch = await reaches(batching, batch.id, *ENDED)
    assert (batch.status, batch.output_file_id) == ("cancelled", None)
    failures = await results(batching, batch.error_file_id)
    assert [one["error"]["code"] for one in failures] == ["batch_cancelled"] * 3
    await until(lambda: batching.serving.requests.live == 0)
    with pytest.raises(openai.ConflictError):
        await batching.client.batches.cancel(batch.id)


async def test_a_batch_whose_time_is_over_expires(batching, database):
    worker = await batching.worker()
    held_back(batching, worker)
    batch = await submitted(batching, line(0))
    await until(lambda: len(worker.submits) == 1, deadline_s=WAIT_S)
    async with database.unit_of_work() as work:
        await work.connection.execute(
            update(tables.batches).values(expires_at=func.now() - timedelta(seconds=5))
        )
    batch = await reaches(batching, batch.id, *ENDED)
    assert batch.status == "expired"
    (failure,) = await results(batching, batch.error_file_id)
    assert failure["error"]["code"] == "batch_expired"


async def test_lines_wait_while_a_client_waits(batching):
    waiting = asyncio.create_task(
        batching.client.chat.completions.create(
            model="fox", messages=[{"role": "user", "content": "a client"}]
        )
    )
    await until(lambda: batching.serving.queue.held == 1, deadline_s=WAIT_S)
    batch = await submitted(batching, line(0))
    await reaches(batching, batch.id, "in_progress")
    assert batching.serving.requests.live == 1, "the client's alone"
    worker = await batching.worker()
    await waiting
    batch = await reaches(batching, batch.id, *ENDED)
    assert batch.status == "completed"
    assert len(worker.submits) == 2


async def test_a_gateway_without_the_lease_writes_nothing(database):
    clock = SystemClock()
    ours, theirs = (BatchRepository(database, clock, name, 2) for name in ("ours", "theirs"))
    request = BatchRequest(input_file_id="file-1", endpoint=CHAT, completion_window="24h")
    batch = await ours.create(KEY, request)
    work = await ours.claim()
    assert work is not None
    assert await theirs.claim() is None, "it is worked on"
    await ours.begin(batch.id, 2)
    await ours.keep(batch.id, Line(number=0, succeeded=True, body=b"{}"))
    await ours.keep(batch.id, Line(number=0, succeeded=True, body=b"again"))
    for late in (
        theirs.keep(batch.id, Line(number=1, succeeded=True, body=b"{}")),
        theirs.renew(batch.id),
        theirs.begin(batch.id, 9),
        theirs.end(work, "completed", None, None),
    ):
        with pytest.raises(LeaseLost):
            await late
    assert [line.body for line in await ours.results(batch.id)] == [b"{}"]
    assert (await ours.get(KEY, batch.id)).request_counts.completed == 1
    await ours.release(batch.id)
    assert (await theirs.claim()).batch_id == batch.id


async def test_keys_see_their_own_and_have_bounds(batching, make_world, database):
    repository = batching.batches.routes.batches
    await batching.batches.runner.stop()
    batch = await submitted(batching, line(0))
    for wanted in (batch.id, "batch_none"):
        with pytest.raises(openai.NotFoundError):
            await batching.client.batches.retrieve(wanted + "x")
    assert (await repository.listed("another", 10, None)) == ([], False)
    files = batching.batches.routes.files
    assert (await files.listed("another", 10, None)) == ([], False)
    few = await make_world(database=database, files_max_per_key=1, batches_max_open_per_key=1)
    await few.batches.runner.stop()
    with pytest.raises(openai.RateLimitError):
        await few.client.files.create(file=("x", b"x"), purpose="batch")
    with pytest.raises(openai.RateLimitError):
        await few.client.batches.create(
            input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"
        )


async def test_lists_have_pages(batching):
    await batching.batches.runner.stop()
    made = [await submitted(batching, line(number)) for number in range(3)]
    seen = [one.id async for one in batching.client.batches.list(limit=2)]
    assert seen == [one.id for one in reversed(made)]
    for query in ("limit=0", "limit=x", "limit=101", "after=nothing"):
        answer = await batching.http.get(f"/v1/batches?{query}")
        assert answer.status_code == 400, query


async def test_old_files_go_with_their_content(batching, database):
    file = await batching.client.files.create(file=("x", b"content"), purpose="batch")
    files = batching.batches.routes.files
    assert await files.sweep(SystemClock().wall() - timedelta(days=1)) == 0
    assert await files.sweep(SystemClock().wall() + timedelta(days=1)) == 1
    assert not await batching.store.exists(f"files/{file.id}")
    with pytest.raises(openai.NotFoundError):
        await batching.client.files.content(file.id)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/json", b"{}"),
        ("multipart/form-data", b"--x"),
        ("multipart/form-data; boundary=x", b"--x\r\n\r\n"),
        ("multipart/form-data; boundary=x", b"--x\r\nno end--x--"),
        ("multipart/form-data; boundary=x", b"--x\r\nA: b\r\n\r\nc\r\n--x--"),
        ("multipart/form-data; boundary=x", b"--x\r\n\r\n" * 40 + b"--x--"),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--',
        ),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{}\r\n--x--',
        ),
    ],
)
async def test_what_is_no_upload_is_refused(batching, kind, body):
    answer = await batching.http.post("/v1/files", content=body, headers={"content-type": kind})
    assert answer.status_code == 400, answer.text


async def test_content_comes_back_as_it_was_sent(batching):
    content = bytes(range(256)) * 5 + b"\r\n--boundary\r\n"
    file = await batching.client.files.create(file=("name.bin", content), purpose="batch")
    assert (file.bytes, file.filename) == (len(content), "name.bin")
    assert (await batching.client.files.content(file.id)).content == content
    with pytest.raises(openai.BadRequestError):
        await batching.client.files.create(file=("x", b"x"), purpose="fine-tune")


async def test_openais_client_has_vectors_made_by_a_batch(database, make_world):
    world = await make_world(
        database=database, pooling=Pooling(mode=PoolingMode.LAST, normalize=True)
    )
    worker = await world.worker()
    worker.script = lambda submit: [
        TokenEntry(
            request_id=submit.request_id,
            attempt=submit.attempt,
            seq=0,
            token_ids=[0],
            finish=FinishReason.LENGTH,
            vector=struct.pack("<2f", len(submit.prompt_ids), 0.5),
        )
    ]
    bodies = [{"model": "fox", "input": ["a", "fox"]}, {"model": "nobody", "input": "a"}]
    url = "/v1/embeddings"
    content = "\n".join(line(n, url=url, body=body) for n, body in enumerate(bodies)).encode()
    file = await world.client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = await world.client.batches.create(
        input_file_id=file.id, endpoint=url, completion_window="24h"
    )
    batch = await reaches(world, batch.id, *ENDED)
    assert (batch.status, batch.request_counts.completed) == ("completed", 1)
    (made,) = await results(world, batch.output_file_id)
    answer = CreateEmbeddingResponse.model_validate(made["response"]["body"], strict=True)
    sizes = [len(world.tokenizer.raw.encode(text).ids) for text in ("a", "fox")]
    assert [each.embedding for each in answer.data] == [[n, 0.5] for n in sizes]
    (failure,) = await results(world, batch.error_file_id)
    assert failure["response"]["body"]["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    "path", ["/v1/files/%00", "/v1/files/%00/content", "/v1/files?after=%00", "/v1/batches/a%00"]
)
async def test_an_id_that_no_row_can_have_is_no_bug(batching, path):
    assert (await batching.http.get(path)).status_code in (400, 404)
    asked = {"endpoint": "/v1/completions", "completion_window": "24h", "input_file_id": "\0"}
    assert (await batching.http.post("/v1/batches", json=asked)).status_code == 400
