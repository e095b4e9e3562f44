"""``pilotlight pull``, and ``run`` with a source: what is asked, copied, checked and registered."""

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_gateway import Reply, ScriptedGateway, chat_lines
from standin_sources import Fault, StandinHub, running_hub

from pilotlight.checkpoint.testing import tiny_config, tiny_files
from pilotlight.cli import checkpoint_copy, obtaining
from pilotlight.cli.main import run
from pilotlight.cli.obtaining import is_source, name_of
from pilotlight.common.sources.ranged import Patience
from pilotlight.common.waiting import Backoff

FILES = {
    **tiny_files(tiny_config()),
    "tokenizer.json": b"{}",
    "README.md": b"not served",
    "onnx/model.onnx": b"x",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandinHub]:
    quick = Patience(stall_timeout_s=0.5, tries=2, backoff=Backoff(first_s=0.001, limit_s=0.002))
    monkeypatch.setattr(obtaining, "PATIENCE", quick)
    with running_hub(FILES) as running:
        monkeypatch.setenv("PILOTLIGHT_HUB_ENDPOINT", running.url)
        monkeypatch.setenv("PILOTLIGHT_HUB_PRIVATE_HOSTS", f"127.0.0.1:{running.cdn.port}")
        yield running


@pytest.fixture
def gateway(near_gateway: ScriptedGateway, tmp_path: Path) -> ScriptedGateway:
    """One that reads models below the state folder alone."""
    registered: list[dict[str, Any]] = []
    near_gateway.answer("GET /v1/models", {"data": []})

    def register(body: dict[str, Any]) -> Reply:
        if not body["uri"].startswith((tmp_path / "home" / "models").as_uri()):
            refusal = {"error": {"code": "uri_not_allowed", "message": "not below a root"}}
            return 422, json.dumps(refusal).encode(), {}
        spec = {"architecture": "LlamaForCausalLM", "part_bytes": [1 << 20]}
        model = {**body, "spec": spec, "dtype": "bfloat16"}
        registered.append(model)
        near_gateway.answer("GET /admin/v1/models", {"models": registered})
        near_gateway.answer(f"GET /admin/v1/models/{body['name']}", model)
        return 201, json.dumps(model).encode(), {}

    near_gateway.answer("GET /admin/v1/models", {"models": []})
    near_gateway.replies["POST /admin/v1/models"] = register
    return near_gateway


def answers(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """A terminal at which this is typed."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal(text))


def test_a_hubs_model_is_fetched_after_a_question(
    gateway: ScriptedGateway,
    hub: StandinHub,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "home" / "models" / "org" / "name"
    answers(monkeypatch, "n\n")
    assert run(["pull", "hf://org/name"]) == 1
    told = capsys.readouterr().err
    commit = hub.refs["main"]
    for part in (f"hf://org/name@{commit}", "MiB in", hub.url, str(folder), "license", "[y/N]"):
        assert part in told
    assert "nothing was fetched" in told
    assert not folder.exists()
    answers(monkeypatch, "y\n")
    assert run(["pull", "hf://org/name"]) == 0
    assert "registered org/name: LlamaForCausalLM" in capsys.readouterr().out
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert found.pop(checkpoint_copy.SOURCE_FILE).decode().strip() == f"hf://org/name@{commit}"
    assert found == {name: FILES[name] for name in found}
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= found.keys()
    assert "README.md" not in found
    assert gateway.asked("POST /admin/v1/models")[-1]["uri"] == folder.as_uri()
    assert [path.name for path in folder.parent.iterdir()] == ["name"]


def test_without_a_terminal_it_takes_a_yes(
    gateway: ScriptedGateway, hub: StandinHub, out: Callable[[], Any]
) -> None:
    assert run(["pull", "hf://org/name", "--json"]) == 1
    error = out()["error"]
    assert error["code"] == "unprocessable"
    assert "--yes" in error["message"]
    assert run(["pull", "hf://org/name", "--name", "mine", "--yes", "--json"]) == 0
    assert out()["name"] == "mine"


def test_run_pulls_registers_and_answers(
    gateway: ScriptedGateway, hub: StandinHub, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.stream("POST /v1/chat/completions", chat_lines("Hello."))
    for _ in range(2):
        assert run(["run", "hf://org/name", "hi", "--yes"]) == 0
        assert capsys.readouterr().out == "Hello.\n"
    assert gateway.asked("POST /v1/chat/completions")[0]["model"] == "org/name"
    assert len(gateway.asked("POST /admin/v1/models")) == 2, "refused, then copied; later known"


def test_what_was_fetched_before_is_not_fetched_again(
    gateway: ScriptedGateway,
    hub: StandinHub,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(checkpoint_copy, "FILES_AT_ONCE", 1)
    lost = Fault("resolve/" + hub.refs["main"] + "/tokenizer.json", "status", 404)
    hub.faults.append(lost)
    assert run(["pull", "hf://org/name", "--yes"]) == 1
    assert "tokenizer.json: the hub answers 404" in capsys.readouterr().err
    (unfinished,) = (tmp_path / "home" / "models" / "org").iterdir()
    hub.cdn.sent_bytes = 0
    assert run(["pull", "hf://org/name", "--yes"]) == 0
    looked_at = len(FILES["model.safetensors"])
    assert hub.cdn.sent_bytes < 2 * looked_at, "once, to look at it; it is not copied again"
    assert not unfinished.exists()


def test_a_damaged_beginning_is_noticed(
    gateway: ScriptedGateway,
    hub: StandinHub,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(checkpoint_copy, "FILES_AT_ONCE", 1)
    lost = Fault("resolve/" + hub.refs["main"] + "/tokenizer.json", "status", 404)
    hub.faults.append(lost)
    assert run(["pull", "hf://org/name", "--yes"]) == 1
    (unfinished,) = (tmp_path / "home" / "models" / "org").iterdir()
    (unfinished / "config.json").write_bytes(b"x")
    (unfinished / "model.safetensors").write_bytes(FILES["model.safetensors"] + b"too long")
    assert run(["pull", "hf://org/name", "--yes"]) == 1
    assert "source_changed: config.json" in capsys.readouterr().err
    assert run(["pull", "hf://org/name", "--yes"]) == 0
    whole = tmp_path / "home" / "models" / "org" / "name"
    assert (whole / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_another_revision_needs_another_name(
    gateway: ScriptedGateway, hub: StandinHub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["pull", "hf://org/name", "--yes"]) == 0
    hub.push({**FILES, "config.json": FILES["config.json"] + b" "}, "later")
    assert run(["pull", "hf://org/name", "--revision", "later", "--yes"]) == 1
    assert "--name" in capsys.readouterr().err
    assert run(["pull", "hf://org/name@later", "--name", "later", "--yes"]) == 0


def test_a_hub_that_cannot_be_reached(
    gateway: ScriptedGateway,
    hub: StandinHub,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["pull", "hf://org/other", "--yes"]) == 1
    assert "404 RepoNotFound" in capsys.readouterr().err
    monkeypatch.setenv("PILOTLIGHT_HUB_ENDPOINT", "http://127.0.0.1:1")
    assert run(["pull", "hf://org/name", "--yes"]) == 1
    told = capsys.readouterr().err
    assert "source_unavailable" in told
    assert "name a folder" in told


def test_what_cannot_be_served_is_refused_before_it_is_fetched(
    gateway: ScriptedGateway, hub: StandinHub, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {**json.loads(FILES["config.json"]), "architectures": ["Mamba2ForCausalLM"]}
    hub.push({**FILES, "config.json": json.dumps(config).encode()})
    assert run(["pull", "hf://org/name", "--yes"]) == 1
    assert "unsupported_model" in capsys.readouterr().err


def test_no_room(
    gateway: ScriptedGateway,
    hub: StandinHub,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(checkpoint_copy, "SPARE_BYTES", 2**62)
    assert run(["pull", "hf://org/name", "--yes"]) == 1
    assert "disk_full" in capsys.readouterr().err


def test_a_folder_is_linked(gateway: ScriptedGateway, tmp_path: Path) -> None:
    original = tmp_path / "My model (1)"
    original.mkdir()
    for name, data in FILES.items():
        if "/" not in name:
            (original / name).write_bytes(data)
    assert run(["pull", str(original), "--yes"]) == 0
    linked = tmp_path / "home" / "models" / "My-model-1-"
    assert (linked / "model.safetensors").samefile(original / "model.safetensors")
    assert not (linked / "README.md").exists()


def test_a_name_that_another_model_has(
    gateway: ScriptedGateway, hub: StandinHub, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["pull", "hf://org/name", "--yes"]) == 0
    commit = hub.refs["main"]
    for same in ("hf://org/name", f"hf://org/name@{commit}", "hf://org/name@main"):
        assert run(["pull", same, "--json"]) == 0, "it is there: nothing is asked"
    other = tmp_path / "other"
    other.mkdir()
    assert run(["pull", str(other), "--name", "org/name", "--yes"]) == 1
    gateway.answer("GET /admin/v1/models/org/name", {"name": "org/name", "uri": "s3://bucket/x"})
    capsys.readouterr()
    assert run(["pull", str(other), "--name", "org/name", "--yes"]) == 1
    assert "already_exists: org/name is registered, from s3://bucket/x" in capsys.readouterr().err


def test_a_system_elsewhere_takes_the_source_as_it_is(
    far_gateway: ScriptedGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    far_gateway.answer("GET /admin/v1/models", {"models": []})
    far_gateway.refuse("POST /admin/v1/models", 422, "uri_not_allowed", "not below a root")
    assert run(["pull", "hf://org/name", "--yes"]) == 1
    assert "PILOTLIGHT_MODEL_ROOTS" in capsys.readouterr().err
    assert far_gateway.asked("POST /admin/v1/models")[0]["uri"] == "hf://org/name"


@pytest.mark.parametrize(
    ("uri", "name"),
    [
        ("hf://Org/Name-1B@main", "Org/Name-1B"),
        ("s3://bucket/a/b", "b"),
        ("s3://bucket", "bucket"),
        ("file:///models/My%20model", "My-model"),
        ("file:///models/_x", "x"),
    ],
)
def test_names_follow_from_sources(uri: str, name: str) -> None:
    assert name_of(uri) == name


def test_sources_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert all(map(is_source, ("hf://org/name", "./x", "/x", "~/x", "here")))
    assert not any(map(is_source, ("ember-7m", "org/name")))


def test_a_name_that_is_none(gateway: ScriptedGateway, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pull", "hf://org/name", "--name", "../x", "--yes"]) == 1
    assert "--name" in capsys.readouterr().err
