"""The whole system, embedded: the path that everything else hangs on."""

import os
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from embedded_system import (
    DEADLINE_S,
    DEMO_FOLDER,
    RunningSystem,
    eventually,
    free_port,
    pilotlight,
    running,
)

pytestmark = [pytest.mark.e2e, pytest.mark.smoke, pytest.mark.slow]

QUESTION = [{"role": "user", "content": "What is a pilot light?"}]


def reference_answer(max_tokens: int) -> str:
    """What transformers makes of the demo model: the same weights and prompt, greedy."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER)
    model = AutoModelForCausalLM.from_pretrained(DEMO_FOLDER, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, do_sample=False, max_new_tokens=max_tokens)
    return str(
        tokenizer.decode(output[0][prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    )


def stream(system: RunningSystem, **options: Any) -> tuple[str, Any, str]:
    with (
        system.openai() as client,
        client.chat.completions.with_streaming_response.create(
            model="ember-7m",
            messages=QUESTION,
            temperature=0,
            max_tokens=48,
            stream=True,
            stream_options={"include_usage": True},
            **options,
        ) as response,
    ):
        chunks = list(response.parse())
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        return text, chunks[-1].usage, response.headers["x-trace-id"]


def test_cold_then_warm(system: RunningSystem) -> None:
    """A model that is loaded nowhere answers correctly; the second request finds it warm and gets
    the same.
    """
    with system.admin() as admin:
        admin.post("/models/ember-7m/evict")
    cold_text, usage, trace_id = stream(system)
    assert cold_text.strip() == reference_answer(48).strip()
    assert "light" in cold_text
    assert usage.completion_tokens > 0
    warm_text, _, _ = stream(system)
    assert warm_text == cold_text
    # No file of tests comes before this one, so the parameters were not in the host pool yet.
    everybody = {"gateway", "scheduler", "loader", "worker"}
    # Spans are written behind: a service sends its own after they have ended.
    eventually(
        lambda: everybody <= {span["service"] for span in system.cli("trace", trace_id)["spans"]}
    )


def test_keys_are_private_and_apart(system: RunningSystem) -> None:
    for name in ("admin", "api"):
        mode = stat.S_IMODE((system.home / f"{name}.key").stat().st_mode)
        assert mode == 0o600
    bearer = {"Authorization": f"Bearer {system.key('api')}"}
    assert httpx2.get(f"{system.url}/admin/v1/models", headers=bearer).status_code == 403
    bearer = {"Authorization": f"Bearer {system.key('admin')}"}
    assert httpx2.get(f"{system.url}/v1/models", headers=bearer).status_code == 403
    assert (
        httpx2.get(
            f"{system.url}/v1/models", headers={"Authorization": "Bearer nobody"}
        ).status_code
        == 401
    )
    assert httpx2.get(f"{system.url}/healthz").status_code == 200


def test_unknown_model_is_an_openai_error(system: RunningSystem) -> None:
    with system.openai() as client, pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="nobody", messages=QUESTION)
    assert caught.value.code == "model_not_found"


def test_completion_from_token_ids(system: RunningSystem) -> None:
    with system.openai() as client:
        first = client.completions.create(
            model="ember-7m", prompt=[0, 5, 6, 7], max_tokens=8, temperature=0, seed=1
        )
        again = client.completions.create(
            model="ember-7m", prompt=[0, 5, 6, 7], max_tokens=8, temperature=0, seed=1
        )
    assert first.choices[0].text == again.choices[0].text


def test_sampling_is_repeatable_by_seed(system: RunningSystem) -> None:
    def ask(seed: int) -> str | None:
        with system.openai() as client:
            reply = client.chat.completions.create(
                model="ember-7m",
                messages=[{"role": "user", "content": "Tell me a short story about a fox."}],
                temperature=1.0,
                seed=seed,
                max_tokens=40,
            )
        return reply.choices[0].message.content

    assert ask(7) == ask(7)
    assert ask(7) != ask(8)


def test_commands_speak_json(system: RunningSystem) -> None:
    listed = system.cli("model", "list")
    assert "ember-7m" in {model["name"] for model in listed["models"]}
    assert system.cli("doctor", "--port", system.url.rsplit(":", 1)[1])["ok"]
    assert system.cli("model", "warm", "ember-7m")["instance_id"]
    assert system.cli("model", "rm", "nobody", status=1)["error"]["code"] == "model_not_found"


def test_views_show_the_fleet(system: RunningSystem) -> None:
    stream(system)
    with system.admin() as admin:
        assert len(admin.get("/workers").json()["workers"]) == 2
        assert len(admin.get("/nodes").json()["nodes"]) == 1
        cold = admin.get("/cold-starts", params={"model": "ember-7m"}).json()["cold_starts"]
        decisions = admin.get("/decisions").json()["decisions"]
    assert cold
    assert decisions
    assert decisions[0]["reasons"]


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pilotlight-e2e-") as folder:
        os.chmod(folder, 0o711)
        yield Path(folder) / "home"


def processes_of(home: Path) -> list[str]:
    """Command lines of processes whose environment or arguments name the state folder."""
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            words = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if os.fsencode(home) in words:
            found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def found_when_ready(home: Path, port: int) -> int:
    """The status of a command for the system on a folder, given the moment its gateway says that it
    is ready.
    """

    def ready() -> bool:
        try:
            return httpx2.get(f"http://127.0.0.1:{port}/readyz", timeout=5.0).status_code == 200
        except httpx2.TransportError:
            return False

    eventually(ready, DEADLINE_S)
    variables = {**os.environ, "PILOTLIGHT_HOME": str(home)}
    command = [pilotlight(), "model", "list", "--json"]
    return subprocess.run(
        command, env=variables, capture_output=True, timeout=DEADLINE_S, check=False
    ).returncode


def test_stops_in_order_and_starts_again_on_its_state(home: Path) -> None:
    with running(home, "--with-demo-model") as first:
        stream(first)
        assert processes_of(home)
    assert first.process.returncode == 0
    assert not processes_of(home)
    port = free_port()
    with ThreadPoolExecutor(1) as beside:
        found = beside.submit(found_when_ready, home, port)
        with running(home, port=port) as second:
            assert found.result() == 0
            assert "ember-7m" in {model["name"] for model in second.cli("model", "list")["models"]}
            text, _, _ = stream(second)
            assert "light" in text
            assert second.cli("down")["stopped"]
            assert second.process.wait(DEADLINE_S) == 0
    assert not processes_of(home)


def test_a_killed_supervisor_leaves_nobody_behind(home: Path) -> None:
    with running(home, "--worker-kind", "sim") as system:
        os.kill(system.process.pid, signal.SIGKILL)
        system.process.wait(DEADLINE_S)
        for pid in pids_of(home):
            wait_for_end(pid)
    assert not processes_of(home)


def test_a_second_system_on_the_same_folder_is_refused(home: Path) -> None:
    with running(home, "--worker-kind", "sim") as system:
        refused = system.cli("up", "--port", "1", status=1)
    assert refused["error"]["code"] == "home_in_use"
    assert "pilotlight down" in refused["error"]["what_to_do"]


def pids_of(home: Path) -> list[int]:
    pids: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if (
                    os.fsencode(home)
                    in (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
                ):
                    pids.append(int(entry.name))
            except OSError:
                continue
    return pids


def wait_for_end(pid: int) -> None:
    import select

    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([handle], [], [], DEADLINE_S)[0], f"process {pid} is still there"
    finally:
        os.close(handle)


def test_up_says_when_its_port_is_taken(system: RunningSystem, home: Path) -> None:
    port = system.url.rsplit(":", 1)[1]
    environment = {**os.environ, "PILOTLIGHT_HOME": str(home)}
    result = subprocess.run(
        [pilotlight(), "up", "--port", port],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in result.stderr
