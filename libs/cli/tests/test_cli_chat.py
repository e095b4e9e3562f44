"""``pilotlight run`` and ``chat``: one answer, a conversation, what is refused."""

import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rich.console import Console
from scripted_gateway import ScriptedGateway, chat_lines

from pilotlight.cli import chat_view
from pilotlight.cli.chat_session import Session
from pilotlight.cli.chat_stream import AnswerLines, Counted, Finish, Loading, Text
from pilotlight.cli.chat_view import AnswerView, printable, told_figures
from pilotlight.cli.conversation import Answer, Conversation
from pilotlight.cli.inference import Access, InferenceClient
from pilotlight.cli.main import run
from pilotlight.common.clock import ManualClock
from pilotlight.common.errors import ContextTooLong, TransientError

CHAT = "POST /v1/chat/completions"
LOADING = ": pilotlight queue=2 phase=fetch progress=0.42 elapsed=1.0s"


@pytest.fixture
def gateway(far_gateway: ScriptedGateway) -> ScriptedGateway:
    far_gateway.answer("GET /v1/models", {"data": [{"id": "tiny"}, {"id": "alias"}]})
    far_gateway.stream(
        CHAT,
        chat_lines("Hel", "lo.", loading=[LOADING]),
        x_request_id="req-1",
        x_trace_id="ab" * 16,
        x_pilotlight_cold_start="true",
    )
    return far_gateway


@pytest.mark.parametrize("command", ["run", "chat"])
def test_a_prompt_is_answered_once(
    gateway: ScriptedGateway, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [command, "tiny", "What", "is it?", "--system", "Be brief", "--temperature", "0"]
    assert run([*asked, "--max-tokens", "9", "-v"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Hello.\n"
    for part in ("7 + 2 tokens", "(cold)", "pilotlight trace req-1"):
        assert part in captured.err
    (body,) = gateway.asked(CHAT)
    assert body["messages"] == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "What is it?"},
    ]
    assert (body["temperature"], body["max_tokens"], body["stream"]) == (0, 9, True)
    assert gateway.seen[-1][1] == "Bearer inference"


def test_json_has_what_the_answer_took(gateway: ScriptedGateway, out: Callable[[], Any]) -> None:
    assert run(["run", "alias", "hi", "--json"]) == 0
    answer = out()
    assert (answer["text"], answer["finish_reason"], answer["cold"]) == ("Hello.", "stop", True)
    assert (answer["prompt_tokens"], answer["output_tokens"]) == (7, 2)
    assert (answer["request_id"], answer["trace_id"]) == ("req-1", "ab" * 16)
    assert 0 <= answer["ttft_s"] <= answer["took_s"]


def test_the_prompt_may_be_standard_input(
    gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
    assert run(["run", "tiny"]) == 0
    assert capsys.readouterr().out == "Hello.\n"
    assert gateway.asked(CHAT)[0]["messages"][-1]["content"] == "from a pipe"
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert run(["run", "tiny", "--json"]) == 1
    assert "--json answers one prompt" in capsys.readouterr().out


def test_an_unknown_name_says_what_there_is(
    gateway: ScriptedGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.answer("GET /admin/v1/models", {"models": [{"name": "tiny"}]})
    assert run(["run", "huge", "hi"]) == 1
    told = capsys.readouterr().err
    assert "model_not_found: there is no model 'huge'; there is tiny." in told
    assert "hf://org/name" in told


def test_errors_are_the_gateways(
    gateway: ScriptedGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.refuse(CHAT, 429, "queue_full", "later")
    assert run(["run", "tiny", "hi"]) == 1
    assert "queue_full: later" in capsys.readouterr().err
    failed = {"error": {"code": "worker_lost", "message": "it died"}}
    gateway.stream(CHAT, [*chat_lines("Hel")[:2], f"event: error\ndata: {json.dumps(failed)}"])
    assert run(["run", "tiny", "hi"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "Hel\n"
    assert "worker_lost: it died" in captured.err
    gateway.stream(CHAT, chat_lines("Hel")[:2])
    assert run(["run", "tiny", "hi"]) == 1
    assert "ended before its end" in capsys.readouterr().err


def test_no_key_and_nobody_there(
    gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch, out: Callable[[], Any]
) -> None:
    monkeypatch.delenv("PILOTLIGHT_API_KEY")
    assert run(["run", "tiny", "hi", "--json"]) == 1
    assert "PILOTLIGHT_API_KEY" in out()["error"]["message"]
    monkeypatch.setenv("PILOTLIGHT_API_KEY", "clé")
    assert run(["run", "tiny", "hi", "--json"]) == 1
    assert out()["error"]["code"] == "invalid_request"
    monkeypatch.setenv("PILOTLIGHT_API_KEY", "key")
    monkeypatch.setenv("PILOTLIGHT_URL", "http://127.0.0.1:1")
    assert run(["run", "tiny", "hi", "--json"]) == 1
    assert out()["error"]["code"] == "system_not_running"


# a conversation


def typed(*lines: str | BaseException) -> Callable[[str], str]:
    """A terminal at which these lines are typed, and then Ctrl-D."""
    left: Iterator[str | BaseException] = iter(lines)

    def read(_: str) -> str:
        line = next(left, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    return read


def converse(gateway: ScriptedGateway, *lines: str | BaseException) -> Session:
    with InferenceClient(Access(gateway.url, "key")) as client:
        session = Session(client, Conversation(model="tiny"), ManualClock(), typed(*lines))
        assert session.run() == 0
    return session


def test_a_conversation_goes_on(
    gateway: ScriptedGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    session = converse(gateway, "one", "", '"""two', 'lines"""', "/bye", "never")
    first, second = gateway.asked(CHAT)
    assert [turn["content"] for turn in first["messages"]] == ["one"]
    assert [turn["content"] for turn in second["messages"]] == ["one", "Hello.", "two\nlines"]
    assert len(session.talk.said) == 4
    told = capsys.readouterr().out
    assert told.count("Hello.\n") == 2
    assert "(cold)" in told, "what a cold start took is told unasked"


def test_commands_within_a_conversation(
    gateway: ScriptedGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    session = converse(
        gateway, "/help", "/system Be brief", "/stats", "one", "/show", "/clear", "/what"
    )
    assert gateway.asked(CHAT)[0]["messages"][0] == {"role": "system", "content": "Be brief"}
    assert (session.talk.said, session.verbose) == ([], True)
    told = capsys.readouterr().out
    for part in ("/bye", "Be brief", "figures are on", "tiny, 1 turns", "forgotten", "/what is no"):
        assert part in told


def test_an_error_ends_no_conversation(
    gateway: ScriptedGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.refuse(CHAT, 400, "context_length_exceeded", "too long")
    session = converse(gateway, KeyboardInterrupt(), "one", "two")
    assert session.talk.said == []
    captured = capsys.readouterr()
    assert captured.err.count("context_length_exceeded: too long") == 2
    assert "/bye or Ctrl-D" in captured.out


def test_an_answer_that_is_left_stays_as_far_as_it_came(gateway: ScriptedGateway) -> None:
    talk = Conversation(model="tiny")

    def leave(part: object) -> None:
        if isinstance(part, Text):
            raise KeyboardInterrupt

    with InferenceClient(Access(gateway.url, "key")) as client:
        answer = talk.ask(client, "one", leave, ManualClock())
        assert (answer.text, answer.finish_reason) == ("Hel", "")
        assert talk.said[-1] == {"role": "assistant", "content": "Hel"}

        def leave_at_once(_: object) -> None:
            raise KeyboardInterrupt

        assert talk.ask(client, "two", leave_at_once, ManualClock()).text == ""
    assert len(talk.said) == 2


# lines of a stream


def test_lines_of_a_stream() -> None:
    lines = AnswerLines()
    assert lines.read(LOADING) == (Loading(ahead=2, phase="fetch", progress=0.42, elapsed_s=1.0),)
    assert lines.read(": pilotlight queue=0 phase=load elapsed=2.5s") == (
        Loading(ahead=0, phase="load", progress=None, elapsed_s=2.5),
    )
    for nothing in ("", ":", ": something else", "id: 3", "event: ping"):
        assert lines.read(nothing) == ()
    thought = {"choices": [{"delta": {"reasoning_content": "hm", "content": "so"}}]}
    assert lines.read(f"data: {json.dumps(thought)}") == (
        Text(text="hm", reasoning=True),
        Text(text="so"),
    )
    plain = {
        "choices": [{"text": "so", "finish_reason": "length"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2},
    }
    assert lines.read(f"data: {json.dumps(plain)}") == (
        Text(text="so"),
        Finish(reason="length"),
        Counted(prompt_tokens=1, output_tokens=2),
    )
    assert not lines.ended
    assert lines.read("data: [DONE]") == ()
    assert lines.ended


def test_errors_in_a_stream() -> None:
    lines = AnswerLines()
    with pytest.raises(TransientError, match="no JSON"):
        lines.read("data: {")
    lines.read("event: error")
    body = {"error": {"code": "context_length_exceeded", "message": "too long"}}
    with pytest.raises(ContextTooLong, match="too long"):
        lines.read(f"data: {json.dumps(body)}")


# what is seen


def test_a_models_text_commands_no_terminal() -> None:
    assert printable("a\x1b[2Jb\r\x9b\x07c\n\tä") == "a[2Jbc\n\tä"


def test_the_bar_is_drawn_where_there_is_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(
        chat_view, "errors", Console(file=screen, force_terminal=True, width=100, color_system=None)
    )
    with AnswerView("tiny") as view:
        view.show(Loading(ahead=2, phase="fetch", progress=0.42, elapsed_s=1.0))
        view.show(Text(text="thought", reasoning=True))
        view.show(Text(text="said"))
    assert "loading tiny" in screen.getvalue()
    assert "fetch 42%, 2 ahead" in screen.getvalue()
    assert capsys.readouterr().out == "thought\n\nsaid\n"


def test_figures_of_an_answer() -> None:
    answer = Answer(model="tiny", prompt_tokens=3, output_tokens=11, ttft_s=0.5, took_s=1.5)
    answer.finish_reason = "length"
    assert told_figures(answer) == (
        "3 + 11 tokens; first after 500 ms; 10.0 tokens/s; cut short by its limit"
    )
    assert Answer(model="tiny").tokens_per_s is None
