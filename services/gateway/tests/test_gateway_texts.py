"""Text helpers: hostile templates, tokenizers and bodies, through real processes and real HTTP."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import pytest

from pilotlight.common.clock import SystemClock
from pilotlight.common.errors import QueueFull, TextUnavailable
from pilotlight.common.testing import MakeContext, until
from pilotlight.common.waiting import pause
from pilotlight.gateway.openai.prompt import PromptEncoder
from pilotlight.gateway.schema.requests import ChatRequest
from pilotlight.gateway.settings import GatewaySettings
from pilotlight.gateway.testing import RESERVED_HELPERS, TEXT_HELPER_MEMORY_BYTES
from pilotlight.gateway.texts import pool
from pilotlight.gateway.texts.frames import Chat, Conversation, Give
from pilotlight.gateway.texts.process import HelperLost, HelperProcess, Launched, end
from pilotlight.gateway.texts.strikes import MAX_STRIKES
from pilotlight.gateway.texts.texts import build_texts
from pilotlight.policy.ids import Digest
from pilotlight.text.bundle import TextBundle
from pilotlight.text.testing import byte_level_json

MODEL = "fox"
CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FOLDED = "{% if messages[0].content == 'boom' %}{{ 'x'|center(400000000) }}{% endif %}" + TEMPLATE
ENDLESS = (
    "{% if messages[0].content == 'boom' %}{{ range(100000)|batch(1)|sum(start=[])|length }}{% endif %}"
    + TEMPLATE
)
HUNGRY = (
    "{% if messages[0].content == 'boom' %}{{ 'x'|center(40000000000)|length }}{% endif %}"
    + TEMPLATE
)
PANICS = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
MANY_PIECES = {"type": "Prepend", "prepend": "x " * 50_000}


def bundle_of(template: str = TEMPLATE, **tokenizer: Any) -> TextBundle:
    changed = {**json.loads(byte_level_json()), **tokenizer}
    return TextBundle(
        tokenizer_json=json.dumps(changed),
        chat_template=template,
        special_tokens={"eos_token": "</s>"},
    )


async def ask(world, content: str) -> httpx2.Response:
    return await world.http.post(
        CHAT, json={"model": MODEL, "messages": [{"role": "user", "content": content}]}
    )


def job(world, content: str = "hello", times: int = 1) -> Chat:
    conversation = Conversation([{"role": "user", "content": content}] * times, None)
    return Chat(
        digest=world.entry.model.text_digest,
        model=MODEL,
        context_tokens=1_000_000,
        conversation=conversation,
    )


def helpers() -> dict[int, str]:
    """Helper processes of this one, and what the system says of them."""
    found: dict[int, str] = {}
    for pid in (
        int(pid)
        for task in Path("/proc/self/task").iterdir()
        for pid in (task / "children").read_text().split()
    ):
        if b"texts.helper" in Path(f"/proc/{pid}/cmdline").read_bytes():
            found[pid] = Path(f"/proc/{pid}/status").read_text()
    return found


def cpu_limits() -> set[str]:
    limits = [Path(f"/proc/{pid}/limits").read_text() for pid in helpers()]
    return {one.split("Max cpu time")[1].split()[0] for one in limits}


def own_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize(
    ("bundle", "content", "status", "code"),
    [
        (bundle_of(FOLDED), "boom", 413, "too_large"),
        (bundle_of(HUNGRY), "boom", 413, "too_large"),
        (bundle_of(ENDLESS), "boom", 422, "text_failed"),
        (bundle_of(pre_tokenizer=PANICS), "a" * 40 + "b", 422, "text_failed"),
        (bundle_of(normalizer=MANY_PIECES), "hello", 400, "context_length_exceeded"),
    ],
    ids=["constant filter", "filter without memory", "endless filter", "panic", "many pieces"],
)
async def test_hostile_text_ends_its_own_request(make_world, bundle, content, status, code):
    world = await make_world(text=bundle, text_short_timeout_s=1.0, max_context_tokens=100)
    before_bytes = own_bytes()
    failed = await ask(world, content)
    assert (failed.status_code, failed.json()["error"]["code"]) == (status, code), failed.text
    assert own_bytes() - before_bytes < 100_000_000
    for said in helpers().values():
        peak_bytes = 1024 * int(said.split("VmPeak:")[1].split()[0])
        assert peak_bytes < 2 * TEXT_HELPER_MEMORY_BYTES, said
    if content != "hello":
        # Others do not notice.
        await world.worker()
        assert (await ask(world, "hello")).status_code == 200


async def test_what_was_used_before_is_held_against_no_job(make_world):
    """As it would be by a limit of all of a helper's time: the kernel's count of that is not the
    one that it tells.
    """
    world = await make_world(text_short_timeout_s=1.0)
    await world.worker()
    assert (await ask(world, "hello")).status_code == 200
    assert cpu_limits() == {"unlimited"}


async def test_a_lost_helper_is_replaced_and_its_job_not_repeated(make_world):
    world = await make_world(text=bundle_of(ENDLESS), text_short_timeout_s=20.0)
    await world.worker()
    assert (await ask(world, "hello")).status_code == 200

    def working() -> list[int]:
        return [pid for pid, said in helpers().items() if "R (running)" in said]

    await until(lambda: len(helpers()) == 3 and not working())
    asking = asyncio.create_task(ask(world, "boom"))
    await until(working)
    os.kill(working()[0], signal.SIGKILL)
    lost = await asking
    assert (lost.status_code, lost.json()["error"]["code"]) == (503, "text_unavailable")
    assert lost.headers["retry-after"] == "1"
    assert (await ask(world, "hello")).status_code == 200


async def test_a_helper_that_stands_still_is_no_fault_of_its_model(make_world):
    world = await make_world(text_short_timeout_s=1.0)
    await world.worker()
    assert (await ask(world, "hello")).status_code == 200
    await until(lambda: len(helpers()) == 3)
    stopped = list(helpers())
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    answers = [await ask(world, "hello") for _ in range(MAX_STRIKES + 1)]
    for pid in {*stopped} & {*helpers()}:
        os.kill(pid, signal.SIGCONT)
    assert answers[0].json()["error"]["code"] == "text_unavailable"
    assert {answer.status_code for answer in answers} == {200, 503}
    assert answers[-1].status_code == 200


async def test_a_model_that_ends_helper_after_helper_is_refused_for_a_while(make_world):
    world = await make_world(text=bundle_of(ENDLESS), text_short_timeout_s=0.1)
    for _ in range(MAX_STRIKES):
        assert (await ask(world, "boom")).status_code == 422
    refused = await ask(world, "hello")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "text_unavailable")
    assert 1 <= int(refused.headers["retry-after"]) <= 60


async def test_long_jobs_stand_in_front_of_nobody(world, monkeypatch: pytest.MonkeyPatch):
    done: list[str] = []
    begun: list[str] = []
    begin = pool.HelperPool._begin

    def noted(helpers: Any, jobs: list[Any], helper: Any) -> None:
        begun.extend(job.lane.owner for job in jobs if job.lane.long)
        begin(helpers, jobs, helper)

    monkeypatch.setattr(pool.HelperPool, "_begin", noted)

    async def encode(name: str, times: int, owner: str) -> None:
        await world.texts.encode(job(world, "x" * 100, times), owner)
        done.append(name)

    flood = [asyncio.create_task(encode("flood", 4000, "flood")) for _ in range(16)]
    await pause(0)
    await asyncio.gather(
        encode("long", 4000, "other"), *(encode("short", 1, "flood") for _ in range(20))
    )
    assert done[-1] == "long"
    # As many of the flood as had begun when it came, and one more: owners take turns.
    assert begun.index("other") <= world.texts._pool._bounds.helpers, begun
    await asyncio.gather(*flood)


async def test_many_prompts_of_one_client_wait(make_context: MakeContext, tmp_path: Path, world):
    """Long before anything is full, none is refused."""
    texts = build_texts(
        make_context("gateway", GatewaySettings(run_dir=tmp_path)), RESERVED_HELPERS
    )
    waiting = [asyncio.create_task(texts.encode(job(world), "one")) for _ in range(1000)]
    await pause(0)
    assert not any(task.done() for task in waiting)
    await texts.stop()
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(error) for error in ended} == {TextUnavailable}


async def test_what_waits_is_bounded(
    make_context: MakeContext, tmp_path: Path, world, monkeypatch: pytest.MonkeyPatch
):
    """Without a helper everything waits."""
    monkeypatch.setattr(pool, "MAX_WAITING", 256)
    texts = build_texts(
        make_context("gateway", GatewaySettings(run_dir=tmp_path)), RESERVED_HELPERS
    )
    waiting = [asyncio.create_task(texts.encode(job(world), "one")) for _ in range(128)]
    await pause(0)
    with pytest.raises(QueueFull) as refused:
        await texts.encode(job(world), "one")
    assert refused.value.retry_after_s
    waiting.append(asyncio.create_task(texts.encode(job(world), "another")))
    await pause(0)
    assert not waiting[-1].done()
    await texts.stop()
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(error) for error in ended} == {TextUnavailable}


async def test_a_bundle_that_many_jobs_bring_takes_its_room_once(
    make_context: MakeContext, tmp_path: Path, world
):
    """As when many requests come at once for a model that no helper has met."""
    settings = GatewaySettings(run_dir=tmp_path, text_queue_bytes=1 << 20)
    helpers = build_texts(make_context("gateway", settings), RESERVED_HELPERS)._pool

    def bringing(digest: str, size_bytes: int) -> asyncio.Task[Any]:
        give = Give(digest=Digest(digest), bundle=bytes(size_bytes))
        return asyncio.create_task(helpers.do(job(world), owner="one", model=digest, give=give))

    waiting = [bringing("first", 600_000) for _ in range(100)]
    await pause(0)
    assert not any(task.done() for task in waiting)
    assert len({id(one.give.bundle) for one in helpers._waiting if one.give}) == 1
    with pytest.raises(QueueFull):
        await bringing("second", 600_000)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    fits = bringing("second", 600_000)
    await pause(0)
    assert not fits.done()
    await helpers.stop()
    with pytest.raises(HelperLost):
        await fits


async def test_a_body_of_empty_messages_does_not_stop_the_loop(world):
    message = b'{"role":"user","content":""}'
    body = b'{"model":"fox","messages":[' + b",".join([message] * 240_000) + b"]}"
    clock, seen = SystemClock(), [0.0]

    async def look() -> None:
        while True:
            seen.append(clock.monotonic_s())
            await pause(0.001)

    looking = asyncio.create_task(look())
    encoder = PromptEncoder(world.texts)
    refused = await asyncio.gather(
        *(encoder.read(body, ChatRequest, "one") for _ in range(3)), return_exceptions=True
    )
    looking.cancel()
    assert {str(error) for error in refused} == {"240000 messages; at most 8192 are taken"}
    assert max(later - earlier for earlier, later in pairwise(seen[1:])) < 1.0
    response = await world.http.post(CHAT, content=body)
    assert (response.status_code, response.json()["error"]["param"]) == (413, "messages")


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template_kwargs": {"x": 2**64}},
        {
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"x": -(2**64)}}}
            ],
            "tool_choice": "required",
        },
    ],
    ids=["variables", "tools"],
)
async def test_numbers_that_no_helper_can_be_told_are_refused(make_world, fields):
    world = await make_world(
        text=bundle_of("{% for tool in tools or () %}{{ tool|tojson }}{% endfor %}" + TEMPLATE)
    )
    for content in ("hello", "x" * 100_000):
        response = await world.http.post(
            CHAT, json={"model": MODEL, "messages": [{**EMPTY, "content": content}], **fields}
        )
        assert (response.status_code, response.json()["error"]["code"]) == (
            400,
            "invalid_request",
        ), response.text
        assert "64 bits" in response.json()["error"]["message"]


class Strange:
    """Starts processes that are no text helpers: they take a job, answer it with something else,
    and leave.
    """

    def launch(self) -> Launched:
        ours, theirs = socket.socketpair()
        fd = theirs.fileno()
        says = (
            f"import os; os.read({fd}, 100); os.write({fd}, bytes([1, 0, 0, 0, 0, 0, 0, 0, 0xC1]))"
        )
        with theirs:
            return Launched(subprocess.Popen([sys.executable, "-c", says], pass_fds=(fd,)), ours)

    def take_back(self, launched: Launched) -> None:
        end(launched)


@pytest.mark.anyio
async def test_a_helper_that_says_something_else_is_lost():
    """Whatever goes wrong with a helper must not end the gateway, as every other error of a
    background task does.
    """
    with pytest.raises(HelperLost, match="it did not come up"):
        await HelperProcess.start(Strange())


EMPTY = {"role": "user", "content": ""}
PART = {"type": "text", "text": ""}
TOOL = {"type": "function", "function": {"name": "f", "description": "x" * 1_048_576}}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": [EMPTY] * 8193}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [PART] * 8193}]}, "messages"),
        (CHAT, {"messages": [EMPTY], "tools": [TOOL]}, None),
        ("/v1/completions", {"prompt": [""] * 4097}, "prompt"),
        ("/v1/completions", {"prompt": [1] * 1_048_577}, "prompt"),
    ],
    ids=["messages", "parts", "tools", "prompts", "token ids"],
)
async def test_requests_are_counted(world, path, fields, param):
    response = await world.http.post(path, json={"model": MODEL, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (413, param), response.text


async def test_a_large_body_is_read_alike(make_world):
    """By a helper, and by the gateway itself."""
    world = await make_world(max_context_tokens=1_000_000)
    worker = await world.worker()
    for times in (10, 1500):
        messages = [{"role": "user", "content": 'naïve 你好 "quoted" 😀 ' * 9}] * times
        body = {
            "model": MODEL,
            "messages": messages,
            "tools": [],
            "max_tokens": 1,
            "logit_bias": {"5": 1.5},
            "stop": ["x"],
        }
        response = await world.http.post(CHAT, json=body)
        assert response.status_code == 200, response.text
        expected = "".join(
            f"<|im_start|>user\n{message['content']}<|im_end|>\n" for message in messages
        )
        submit = worker.submits[-1]
        rendered = f"{expected}<|im_start|>assistant\n"
        assert submit.prompt_ids == world.tokenizer.encode(rendered, add_special_tokens=False)
        assert (submit.sampling.max_tokens, submit.sampling.logit_bias) == (1, ((5, 1.5),))
