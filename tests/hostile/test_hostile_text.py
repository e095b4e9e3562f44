"""Hostile chat templates, tokenizers and bodies against a whole system: their requests and
registrations fail, and no others notice.
"""

import json
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import pytest
from embedded_system import DEADLINE_S, DEMO_FOLDER, RunningSystem, running

from pilotlight.common.clock import SystemClock

pytestmark = pytest.mark.hostile

DEMO = "ember-7m"
FILTER = "{{ 'x'|center(400000000) }}"
ENDLESS = "{{ range(100000)|batch(1)|sum(start=[])|length }}"
WHEN_ASKED = (
    "{%% if messages[-1].content == 'boom' %%}%s{%% endif %%}hello {{ messages[-1].content }}"
)
SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
MAX_GATEWAY_BYTES = 500 * 2**20
MAX_HELPER_BYTES = 1536 * 2**20
"""What a helper has at its start, and what a job may take."""
MAX_PAUSE_S = 10.0
"""Of another client's stream, on a machine that does everything else, too."""
MAX_CPU_S = 0.5
"""What a body may cost the gateway's own process, the stream beside it included; it was seconds."""


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSystem]:
    folder = tmp_path_factory.mktemp("hostile")
    folder.chmod(0o711)
    environment = {
        "PILOTLIGHT_MODEL_ROOTS": str(folder),
        "PILOTLIGHT_TEXT_SHORT_TIMEOUT_S": "3",
        "PILOTLIGHT_TEXT_TIMEOUT_S": "3",
    }
    with running(
        folder / "home", "--workers", "1", "--with-demo-model", environment=environment
    ) as started:
        yield started


def checkpoint(
    system: RunningSystem, name: str, *, template: str | None = None, **tokenizer: Any
) -> str:
    """A copy of the demo model with another template, or another tokenizer."""
    folder = shutil.copytree(DEMO_FOLDER, system.home.parent / name)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **tokenizer}))
    return folder.as_uri()


def register(system: RunningSystem, name: str, **changes: Any) -> httpx2.Response:
    body = {
        "name": name,
        "uri": checkpoint(system, name, **changes),
        "slo": {"ttft_ms": 2000, "tpot_ms": 100},
    }
    with system.admin() as admin:
        return admin.post("/models", json=body)


def ask(system: RunningSystem, model: str, content: str) -> httpx2.Response:
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 4}
    return post(system, json.dumps(body).encode())


def post(system: RunningSystem, body: bytes, path: str = "chat/completions") -> httpx2.Response:
    headers = {"Authorization": f"Bearer {system.key('api')}", "Content-Type": "application/json"}
    return httpx2.post(f"{system.url}/v1/{path}", content=body, headers=headers, timeout=DEADLINE_S)


def processes(system: RunningSystem) -> dict[str, list[int]]:
    """Most memory that the gateway and each of its helpers have had."""
    found: dict[str, list[int]] = {"pilotlight.gateway": [], "pilotlight.gateway.texts.helper": []}
    for folder in Path("/proc").iterdir():
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            environment = (folder / "environ").read_bytes()
            status = (folder / "status").read_text()
        except OSError:
            continue
        helper = b"pilotlight.gateway.texts.helper" in command
        ours = helper or f"PILOTLIGHT_HOME={system.home}".encode() in environment
        for name, peaks in found.items():
            if ours and name.encode() in command:
                peak = "VmPeak:" if helper else "VmHWM:"
                peaks.append(1024 * int(status.split(peak)[1].split()[0]))
    return found


def test_what_cannot_be_used_is_not_registered(system: RunningSystem) -> None:
    charsmap = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    for name, changes, words in (
        ("folded", {"template": FILTER}, "16777216"),
        ("endless", {"template": ENDLESS}, "it took more"),
        ("charsmap", {"normalizer": charsmap}, "charsmap"),
    ):
        answer = register(system, name, **changes)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (422, "bad_checkpoint"), answer.text
        assert words in error["message"]
    peaks = processes(system)
    assert max(peaks["pilotlight.gateway"]) < MAX_GATEWAY_BYTES, peaks
    assert max(peaks["pilotlight.gateway.texts.helper"]) < MAX_HELPER_BYTES, peaks


def test_requests_of_a_hostile_model_fail_alone(system: RunningSystem) -> None:
    pieces = {"type": "Prepend", "prepend": "x " * 1_000_000}
    for name, changes, content, codes in (
        ("asked-folded", {"template": WHEN_ASKED % FILTER}, "boom", {"too_large", "text_failed"}),
        ("asked-endless", {"template": WHEN_ASKED % ENDLESS}, "boom", {"text_failed"}),
        ("split", {"pre_tokenizer": SPLIT}, "a" * 40 + "b", {"text_failed"}),
        (
            "pieces",
            {"normalizer": pieces},
            "hello",
            {"text_failed", "too_large", "context_length_exceeded"},
        ),
    ):
        answer = register(system, name, **changes)
        assert answer.status_code == 201, answer.text
        with ThreadPoolExecutor(3) as pool:
            asked = [pool.submit(ask, system, name, content) for _ in range(2)]
            assert ask(system, DEMO, "hello").status_code == 200
            for answer in (future.result() for future in asked):
                assert answer.json()["error"]["code"] in codes, answer.text
    peaks = processes(system)
    assert max(peaks["pilotlight.gateway"]) < MAX_GATEWAY_BYTES, peaks


def gateway_cpu_s(system: RunningSystem) -> float:
    """Processor time of the gateway's own process."""
    for folder in Path("/proc").iterdir():
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            if (
                b"pilotlight.gateway" in command
                and f"PILOTLIGHT_HOME={system.home}".encode() in (folder / "environ").read_bytes()
            ):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except OSError:
            continue
    raise AssertionError("there is no gateway")


EMPTY_MESSAGES = b'{"model":"%s","messages":[%s]}' % (
    DEMO.encode(),
    b",".join([b'{"role":"user","content":""}'] * 240_000),
)
BLANKS = json.dumps({"model": DEMO, "prompt": " " * 7_000_000}).encode()


@pytest.mark.parametrize(
    ("path", "body", "count", "code"),
    [
        ("chat/completions", EMPTY_MESSAGES, 20, "too_large"),
        ("completions", BLANKS, 40, "context_length_exceeded"),
    ],
    ids=["empty messages", "blanks"],
)
def test_a_flood_of_large_bodies_pauses_no_stream(
    system: RunningSystem, path: str, body: bytes, count: int, code: str
) -> None:
    """Each body gets its own error, or is turned away while the others take the room for bodies or
    the helpers' queue.
    """
    clock, streamed_s, flooded = SystemClock(), list[float](), threading.Event()

    def stream() -> None:
        with system.openai() as client:
            while not flooded.is_set():
                for _ in client.completions.create(
                    model=DEMO,
                    prompt="the",
                    max_tokens=200,
                    stream=True,
                    extra_body={"ignore_eos": True},
                ):
                    streamed_s.append(clock.monotonic_s())

    assert ask(system, DEMO, "hello").status_code == 200
    before_s = gateway_cpu_s(system)
    with ThreadPoolExecutor(5) as pool:
        streaming = pool.submit(stream)
        answers = list(pool.map(lambda _: post(system, body, path), range(count)))
        spent_s = gateway_cpu_s(system) - before_s
        flooded.set()
        streaming.result()
    codes = {answer.json()["error"]["code"] for answer in answers}
    assert code in codes <= {code, "bodies_full", "queue_full"}, {
        answer.text[:500] for answer in answers
    }
    longest_s = max(later - earlier for earlier, later in pairwise(streamed_s))
    print(
        f"{count} bodies of {len(body)} bytes: longest pause of another stream {1000 * longest_s:.0f} ms, "
        f"{1000 * spent_s / count:.0f} ms of the gateway's processor for each"
    )
    assert spent_s / count < MAX_CPU_S
    assert longest_s < MAX_PAUSE_S
    assert max(processes(system)["pilotlight.gateway"]) < MAX_GATEWAY_BYTES
