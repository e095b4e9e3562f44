"""What ``make bench-served-gpu`` does with bytes, figures and parts: no server and no device is
needed for it.
"""

import asyncio
import json
import os
import statistics
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

BENCH = Path(__file__).resolve().parents[3] / "bench"


@pytest.fixture(autouse=True)
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))


def stream(events: list[Any]) -> bytes:
    """An answer as servers send it: each event in a chunk of its own."""
    texts = [
        b"data: " + (each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n\n"
        for each in events
    ]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(text), text) for text in texts)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nX-Trace-Id: abc\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + chunks + b"0\r\n\r\n"


def text(piece: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": piece, "finish_reason": None}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}


def read(reads):
    from served_gpu_client import Answer, read_answer

    answer = Answer(None, 0.5)
    read_answer(answer, reads, 100.0)
    return answer


def test_events_are_timed_by_the_bytes_that_end_them():
    whole = stream([text("a"), text(""), text("b"), text("c"), USAGE, b"[DONE]"])
    places = [whole.index(mark) for mark in (b'"a"', b'"b"', b'"c"')]
    # Each read ends in the middle of the event that has the mark: the event is there with the next.
    ends = [*places, len(whole)]
    reads = [
        (101.0 + number, whole[begin:end])
        for number, (begin, end) in enumerate(zip([0, *places], ends, strict=True))
    ]
    answer = read(reads)
    assert (answer.error, answer.trace_id) == ("", "abc")
    assert (answer.first_s, answer.last_s, answer.gaps_s) == (2.0, 4.0, [1.0, 1.0])
    assert (answer.events, answer.prompt_tokens, answer.output_tokens) == (3, 5, 3)


@given(cuts=st.lists(st.integers(1, 600), unique=True, max_size=30).map(sorted))
def test_an_answer_is_the_same_however_it_is_cut(cuts):
    whole = stream([text("a"), text("b"), USAGE, b"[DONE]"])
    pieces = [whole[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    answer = read([(100.0 + number, piece) for number, piece in enumerate(pieces)])
    assert (answer.error, answer.events, answer.output_tokens) == ("", 2, 3)


def test_what_goes_wrong_is_told():
    refusal = b"HTTP/1.1 429 Too Many\r\ncontent-length: 6\r\n\r\nno way"
    assert "429: no way" in read([(100.0, refusal)]).error
    assert (
        "in the stream"
        in read([(100.0, stream([text("a"), {"error": {"code": "engine_failed"}}]))]).error
    )
    assert "without [DONE]" in read([(100.0, stream([text("a"), USAGE]))]).error
    assert "after 0 texts" in read([(100.0, stream([USAGE, b"[DONE]"]))]).error


class Server:
    """Answers every completion with its number of tokens, and counts who asks at a time."""

    def __init__(self) -> None:
        self.asking = self.most = self.asked = 0
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(self._serve(started),)
        )
        self._thread.start()
        assert started.wait(10)

    async def _serve(self, started: threading.Event) -> None:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        await self._ended.wait()
        server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n") if not reader.at_eof() else b"":
            size = next(
                int(line.split(b":")[1])
                for line in head.split(b"\r\n")
                if line.startswith(b"content-length")
            )
            body = json.loads(await reader.readexactly(size))
            self.asking, self.asked = self.asking + 1, self.asked + 1
            self.most = max(self.most, self.asking)
            usage = {
                "prompt_tokens": len(body["prompt"].split()),
                "completion_tokens": body["max_tokens"],
            }
            writer.write(
                stream(
                    [*[text("x")] * body["max_tokens"], {"choices": [], "usage": usage}, b"[DONE]"]
                )
            )
            self.asking -= 1
            await writer.drain()
        writer.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(10)
        self._loop.close()


@pytest.fixture
def server():
    running = Server()
    yield running
    running.stop()


@pytest.mark.parametrize("arriving", [False, True])
def test_every_request_is_asked_once_by_processes_of_their_own(server, arriving):
    from served_gpu_load import Load, Target, arrivals, ask, figures

    words, outputs = [1, 2, 3, 4] * 16, [2, 5] * 32
    prompts = [" ".join(["w"] * count) for count in words]
    load = Load(prompts, words, outputs, 64, arrivals(64, 1000.0, 1) if arriving else None)
    assert load.processes == (4 if arriving else 2)
    answers, wrong = ask(Target("127.0.0.1", server.port, "m"), load)
    assert (wrong, server.asked) == ([], 64)
    found = figures(answers, 1000.0 if arriving else None)
    assert (
        found["requests"],
        found["failed"],
        found["output_tokens"],
        found["tokens_per_event"],
    ) == (64, 0, sum(outputs), 1.0)
    assert ("goodput_per_s" in found) == arriving


def test_other_numbers_of_tokens_than_asked_for_are_wrong(server):
    from served_gpu_load import Load, Target, ask

    _, wrong = ask(Target("127.0.0.1", server.port, "m"), Load(["a b", "a"], [2, 2], [3, 3], 1))
    assert "other numbers of tokens" in wrong[0]


def answer(sent_s: float, first_s: float, last_s: float, tokens: int, **more: Any):
    from served_gpu_client import Answer

    return Answer(
        None, sent_s, first_s=first_s, last_s=last_s, output_tokens=tokens, events=tokens, **more
    )


def test_figures_of_a_round():
    from served_gpu_load import figures

    good = answer(0.0, 0.1, 0.3, 21, gaps_s=[0.01] * 20)
    late = answer(0.5, 0.8, 0.9, 11, gaps_s=[0.01] * 10)
    slow = answer(1.0, 1.1, 2.0, 11, gaps_s=[0.09] * 10)
    failed = answer(1.0, 0.0, 0.0, 0, error="status 500")
    found = figures([good, late, slow, failed], 4.0)
    assert (found["requests"], found["failed"], found["output_tokens"], found["seconds"]) == (
        4,
        1,
        43,
        2.0,
    )
    assert found["output_tokens_per_s"] == 21.5
    assert (found["ttft_ms_p50"], found["tpot_ms_p50"], found["itl_ms_p50"]) == pytest.approx(
        (100.0, 10.0, 10.0)
    )
    assert (found["good_share"], found["goodput_per_s"]) == (0.25, 1.0)


@given(values=st.lists(st.floats(0, 1e6), min_size=2, max_size=50))
def test_percentiles_are_the_inclusive_ones(values):
    from served_gpu_load import percentile

    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert percentile(values, 0.5) == pytest.approx(cuts[49])
    assert percentile(values, 0.99) == pytest.approx(cuts[98])
    assert percentile([], 0.5) == 0.0


def test_arrivals_are_the_same_for_everybody():
    from served_gpu_load import arrivals

    at_s = arrivals(4000, 20.0, 3)
    assert at_s == sorted(arrivals(4000, 20.0, 3)) != arrivals(4000, 20.0, 4)
    assert 190 < at_s[-1] < 210


def test_conversations_are_the_sample_whole_before_any_comes_again():
    from served_gpu import conversations

    prompts, outputs = conversations(256, 5, 1)
    once = sorted(zip(prompts[:128], outputs[:128], strict=True))
    assert once == sorted(zip(prompts[128:], outputs[128:], strict=True))
    assert prompts[:128] != prompts[128:]


def test_a_part_ends_before_its_limit():
    from served_gpu import LIMIT_S, SIZES, STOP_S, rows

    class NoPrompts:
        def draw(self, seed: int, lengths: list[int]) -> list[str]:
            return [""] * len(lengths)

    for shape in ("4B", "8B"):
        planned = list(rows(SIZES[shape], NoPrompts()))
        assert sum(row.predicted_s for row in planned) < LIMIT_S - STOP_S - 115, (
            "weights, start and cold starts take the rest"
        )
        named = [row.name for row in planned if row.name]
        assert len(named) == 3 * 4 + 3 * 3 + 3


def test_each_token_of_the_tokenizer_is_read_as_itself(tmp_path):
    from served_gpu_models import END, Prompts, tokenizer

    size = 256 + 100 + 2 * 2500 + 1 + 1000
    made = tokenizer(size)
    assert made.get_vocab_size() == size
    words = [token for token in made.get_vocab() if token.startswith("Ġ") and len(token) > 1]
    assert len(words) == 3500
    assert all(len(made.encode(made.decode([made.token_to_id(word)])).ids) == 1 for word in words)
    assert made.encode(f"a{END}").ids[-1] == made.token_to_id(END)
    made.save(str(tmp_path / "tokenizer.json"))
    drawn = Prompts.of(tmp_path).draw(1, [3, 161, 40])
    assert [len(made.encode(prompt).ids) for prompt in drawn] == [3, 161, 40]
    assert (
        drawn
        == Prompts.of(tmp_path).draw(1, [3, 161, 40])
        != Prompts.of(tmp_path).draw(2, [3, 161, 40])
    )


def part(name: str, tokens_per_s: list[float], cold: dict[str, Any], **more: Any) -> dict[str, Any]:
    from served_gpu_join import AT_ONCE

    rounds = [
        dict.fromkeys(AT_ONCE, 10.0) | {"output_tokens_per_s": figure} for figure in tokens_per_s
    ]
    conversation = dict.fromkeys(AT_ONCE, 10.0) | {"goodput_per_s": 8.0}
    about = {"date": "2026-11-22", "commit": "", "machine": "one", "load": "none", "complete": True}
    found = {
        "part": name,
        **about,
        "rows": {"64 concurrent": rounds, "AzureConv at 8/s": [conversation]},
    }
    return {**found, "cold": cold, "left_out": [], "wrong": [], **more}


def test_parts_are_joined_with_ratios_and_floors():
    from served_gpu_join import joined, table
    from served_gpu_servers import cold_from_start

    cold = {"first_token_s": 0.5, "phases_s": {"load": 0.1}}
    ours = part("ours-4B", [90.0, 110.0], {"first": cold, "again": cold})
    theirs = part(
        "vllm-4B",
        [80.0, 140.0],
        cold_from_start(59.0, 1.0),
        left_out=["x"],
        wrong=["y: status 500"],
    )
    document = joined([ours, theirs], "abcdef1 2026-11-21")
    by_name = {measured["what"]: measured for measured in document["measurements"]}
    rate = by_name["4B: 64 concurrent: output_tokens_per_s"]
    assert rate["samples"] == {"ours": [90.0, 110.0], "vLLM": [80.0, 140.0]}
    assert (rate["medians"], rate["ratio"], rate["floor"]) == (
        {"ours": 100.0, "vLLM": 110.0},
        0.909,
        1.0,
    )
    assert (rate["commit"], rate["commit_date"]) == ("abcdef1", "2026-11-21")
    assert by_name["4B: 64 concurrent: ttft_ms_p50"]["ratio"] == 1.0
    assert by_name["4B: AzureConv at 8/s: goodput_per_s"]["floor"] == 1.0
    assert "floor" not in by_name["4B: AzureConv at 8/s: ttft_ms_p50"]
    colds = [
        (measured["ratio"], measured.get("floor"))
        for name, measured in by_name.items()
        if "cold start" in name
    ]
    assert colds == [(120.0, None), (120.0, 50.0)]
    phases = [one["our_phases_s"] for one in by_name.values() if "our_phases_s" in one]
    assert phases == [{"load": 0.1}] * 2
    assert document["missed"] == [
        "4B: 64 concurrent: output_tokens_per_s: 0.909 of vLLM's, floor 1.0",
        "vllm-4B: left out: x",
        "vllm-4B: y: status 500",
    ]
    assert "MISSED  vllm-4B: left out: x" in table(document)


def test_one_side_alone_has_figures_and_no_ratios():
    from served_gpu_join import joined, table

    unfinished = part("ours-8B", [90.0], {}, complete=False)
    document = joined([unfinished], "abcdef1 2026-11-21")
    assert all("ratio" not in measured for measured in document["measurements"])
    assert document["missed"] == ["ours-8B: not run to its end"]
    assert "8B: 64 concurrent: output_tokens_per_s" in table(document)
    assert joined([], "")["measurements"] == []


def test_less_time_is_better_and_nothing_is_no_ratio():
    from served_gpu_join import ratio

    assert ratio(2.0, 3.0, more_is_better=False) == 1.5
    assert ratio(2.0, 4.0, more_is_better=True) == 0.5
    assert ratio(2.0, 0.0, more_is_better=True) is None


def test_processor_time_is_told_by_role():
    from served_gpu_cpu import Reading, Thread, taken

    def reading(at_s: float, gateway_s: float, helpers_s: float) -> Reading:
        roles = {
            1: ("gateway", gateway_s),
            2: ("helper", helpers_s),
            3: ("helper", helpers_s),
            4: ("idle", 0.0),
        }
        threads = {
            (1, 1): Thread("gateway", "python", gateway_s / 2),
            (1, 2): Thread("gateway", "loop", gateway_s / 4),
        }
        return Reading(
            at_s,
            roles,
            threads | {(pid, pid): Thread("helper", "python", helpers_s) for pid in (2, 3)},
        )

    told = taken(reading(10.0, 1.0, 1.0), reading(12.0, 3.0, 1.5))
    assert (told["seconds"], told["cores"]) == (2.0, 1.5)
    assert told["roles"]["gateway"] == {
        "processes": 1,
        "cpu_s": 2.0,
        "cores": 1.0,
        "busiest_thread": {"name": "python", "cores": 0.5},
    }
    assert (told["roles"]["helper"]["processes"], told["roles"]["helper"]["cores"]) == (2, 0.5)
    assert "idle" not in told["roles"]


def test_processes_are_called_by_what_they_do():
    from served_gpu_cpu import read, role_of

    assert role_of(["/usr/bin/python3", "-m", "pilotlight.gateway", ""]) == "gateway"
    assert (
        role_of(["python", "-m", "pilotlight.worker.engine_main", "--spare", ""])
        == "spare worker.engine_main"
    )
    assert role_of(["/opt/bin/nats-server", "-c", "x"]) == "nats-server"
    assert role_of(["VLLM::EngineCore", ""]) == "VLLM::EngineCore"
    assert os.getpid() in read(os.getpid()).processes


@pytest.mark.parametrize(("shown", "mib"), [(None, 7), ("", 7), ("1,0", 9), ("GPU-1b", 9)])
def test_memory_is_that_of_the_device_that_is_shown(tmp_path, monkeypatch, shown, mib):
    from served_gpu_servers import used_bytes_of_device

    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        '#!/bin/sh\ncase "$*" in *--id=1*|*--id=GPU-1b*) echo 9;; *) echo 7; echo 9;; esac\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert used_bytes_of_device() == mib << 20
