"""``pilotlight bench``: what is asked, the figures, what goes wrong; and completion for shells."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_gateway import ScriptedGateway, chat_lines

from pilotlight.cli.load_figures import Sample, figures, percentile
from pilotlight.cli.load_prompts import arrivals, random_prompts, sharegpt_prompts
from pilotlight.cli.main import run
from pilotlight.common.errors import BadRequest

CHAT, COMPLETION = "POST /v1/chat/completions", "POST /v1/completions"


@pytest.fixture
def gateway(far_gateway: ScriptedGateway) -> ScriptedGateway:
    far_gateway.answer("POST /tokenize", {"tokens": [5, 3, 3, 9], "count": 4})
    far_gateway.stream(COMPLETION, chat_lines("a", "b", "c"), x_pilotlight_cold_start="false")
    far_gateway.stream(CHAT, chat_lines("a", "b"))
    return far_gateway


def test_random_prompts(gateway: ScriptedGateway, out: Callable[[], Any], tmp_path: Path) -> None:
    saved = tmp_path / "figures.json"
    asked = ["bench", "tiny", "-n", "6", "-c", "2", "--input-len", "12", "--output-len", "3"]
    assert run([*asked, "--save", str(saved), "--json"]) == 0
    found = out()
    assert (found["requests"], found["failed"], found["output_tokens"]) == (6, 0, 18)
    assert found["prompt_tokens"] == 42
    assert set(found["ttft_ms"]) == {"mean", "p50", "p90", "p95", "p99"}
    assert json.loads(saved.read_text()) == found
    bodies = gateway.asked(COMPLETION)
    assert len(bodies) == 7, "one before, uncounted"
    for body in bodies:
        assert len(body["prompt"]) == 12
        assert set(body["prompt"]) <= {3, 5, 9}
        assert (body["max_tokens"], body["ignore_eos"], body["temperature"]) == (3, True, 0)
    prompts = [body["prompt"] for body in bodies]
    assert sorted(prompts[1:]) == sorted(
        prompt.asked for prompt in random_prompts(6, 12, 3, [3, 5, 9], random.Random(0))
    )


def test_conversations_of_a_file_at_a_rate(
    gateway: ScriptedGateway, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "sharegpt.json"
    turns = [{"from": "human", "value": "What is it?"}, {"from": "gpt", "value": "x" * 40}]
    file.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[:1]}, 7]))
    asked = ["bench", "tiny", "-n", "3", "--dataset", "sharegpt", "--dataset-path", str(file)]
    assert run([*asked, "--request-rate", "500", "--no-warmup", "--no-ignore-eos"]) == 0
    told = capsys.readouterr().out
    assert "3 requests (sharegpt.json), 500 a second" in told
    for name in ("TTFT", "TPOT", "ITL", "E2EL", "p99", "requests/s"):
        assert name in told
    bodies = gateway.asked(CHAT)
    assert [body["messages"][0]["content"] for body in bodies] == ["What is it?"] * 3
    assert {body["max_tokens"] for body in bodies} == {10}
    assert "ignore_eos" not in bodies[0]


def test_requests_that_fail_are_told(
    gateway: ScriptedGateway, capsys: pytest.CaptureFixture[str], out: Callable[[], Any]
) -> None:
    gateway.refuse(COMPLETION, 429, "queue_full", "later")
    assert run(["bench", "tiny", "-n", "2", "--json"]) == 1
    assert out()["error"]["code"] == "queue_full", "the one before says that none would do"
    assert run(["bench", "tiny", "-n", "2", "--no-warmup", "--json"]) == 1
    found = out()
    assert (found["failed"], found["errors"]) == (2, ["queue_full: later"])
    gateway.stream(COMPLETION, chat_lines("a")[:2])
    assert run(["bench", "tiny", "-n", "2", "--no-warmup"]) == 1
    assert (
        "failed: unavailable: the answer ended before its end was told" in capsys.readouterr().out
    )
    gateway.refuse("POST /tokenize", 404, "model_not_found", "no model")
    assert run(["bench", "tiny", "--json"]) == 1
    assert out()["error"]["code"] == "model_not_found"


def test_what_does_not_go_together(gateway: ScriptedGateway, out: Callable[[], Any]) -> None:
    assert run(["bench", "tiny", "--dataset", "sharegpt", "--json"]) == 1
    assert "--dataset-path" in out()["error"]["message"]
    assert run(["bench", "tiny", "--request-rate", "0", "--json"]) == 1
    assert out()["error"]["code"] == "invalid_request"


def test_nobody_there(gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTLIGHT_URL", "http://127.0.0.1:1")
    assert run(["bench", "tiny", "--json"]) == 1


@pytest.mark.parametrize("content", ["{", "[]", '[{"conversations": []}]', '{"a": 1}'])
def test_files_that_have_no_conversations(content: str, tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_text(content)
    with pytest.raises(BadRequest, match=r"file\.json"):
        sharegpt_prompts(file, 1, None, random.Random(0))
    with pytest.raises(BadRequest, match="cannot read"):
        sharegpt_prompts(tmp_path / "none", 1, None, random.Random(0))


def test_figures() -> None:
    first = Sample(sent_s=1.0, prompt_tokens=10, output_tokens=3, planned_s=0.5)
    for at_s in (1.5, 2.0, 3.0):
        first.text(at_s)
    silent = Sample(sent_s=1.0, last_s=2.0, output_tokens=1)
    found = figures([first, silent, Sample(error="x"), Sample(error="x")])
    assert (found["requests"], found["failed"], found["errors"]) == (4, 2, ["x"])
    assert found["ttft_ms"]["p50"] == 500.0
    assert found["tpot_ms"]["mean"] == 750.0
    assert found["itl_ms"] == {
        "mean": 750.0,
        "p50": 750.0,
        "p90": 950.0,
        "p95": 975.0,
        "p99": 995.0,
    }
    assert found["e2el_ms"]["p99"] == 1990.0
    assert (found["took_s"], found["requests_per_s"], found["output_tokens_per_s"]) == (
        2.0,
        1.0,
        2.0,
    )
    assert found["sent_late_ms_p99"] == 500.0
    assert figures([])["output_tokens_per_s"] == 0.0
    assert percentile([], 0.5) == 0.0


def test_arrivals_are_poissons_and_repeatable() -> None:
    found = arrivals(2000, 10.0, random.Random(1))
    assert found == arrivals(2000, 10.0, random.Random(1)) == sorted(found)
    assert found[0] == 0.0
    assert 180 < found[-1] < 220


# completion


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_for_each_shell(
    shell: str,
    capsys: pytest.CaptureFixture[str],
    out: Callable[[], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "pilotlight" in script
    assert "why-evicted" in script
    monkeypatch.setenv("SHELL", f"/bin/{shell}")
    assert run(["completion", "--json"]) == 0
    found = out()
    assert (found["shell"], found["script"].strip()) == (shell, script.strip())


def test_completion_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: Callable[[], Any]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run(["completion", "bash", "--install", "--json"]) == 0
    assert "pilotlight" in Path(out()["path"]).read_text()
    monkeypatch.setenv("SHELL", "/bin/csh")
    assert run(["completion", "--json"]) == 1
    assert "bash, zsh or fish" in out()["error"]["message"]
