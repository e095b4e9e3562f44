"""The demo model from a folder, from a hub and from an S3 server: one system, three cold starts,
the same tokens.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from embedded_system import DEMO_FOLDER, RunningSystem, running
from standin_s3 import ACCESS_KEY, SECRET_KEY, StandinS3, running_s3
from standin_sources import Asked, StandinHub, running_hub

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

QUESTION = [{"role": "user", "content": "What is a pilot light?"}]
TOKEN = "hf_for_this_test"
FILES = {path.name: path.read_bytes() for path in DEMO_FOLDER.iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def hub() -> Iterator[StandinHub]:
    with running_hub(FILES, repository="pilotlight/ember-7m", token=TOKEN) as server:
        yield server


@pytest.fixture(scope="module")
def s3() -> Iterator[StandinS3]:
    with running_s3("models") as server:
        server.put("models", "demo/ember-7m", FILES)
        yield server


@pytest.fixture(scope="module")
def system(
    hub: StandinHub, s3: StandinS3, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningSystem]:
    home: Path = tmp_path_factory.mktemp("sources")
    home.chmod(0o711)
    # Credentials come as files, or in the environment's usual names: one of each.
    secrets = home / "home" / "secrets"
    secrets.mkdir(parents=True)
    (secrets / "s3-access-key").write_text(f"{ACCESS_KEY}\n")
    (secrets / "s3-secret-key").write_text(f"{SECRET_KEY}\n")
    environment = {
        "PILOTLIGHT_MODEL_ROOTS": f"{DEMO_FOLDER},{home / 'copies'},s3://models/demo,hf://pilotlight",
        "PILOTLIGHT_S3_ENDPOINT": s3.url,
        "PILOTLIGHT_S3_ALLOW_HTTP": "true",
        "PILOTLIGHT_HUB_ENDPOINT": hub.url,
        "PILOTLIGHT_HUB_PRIVATE_HOSTS": f"127.0.0.1:{hub.cdn.port}",
        "HF_TOKEN": TOKEN,
    }
    with running(home / "home", environment=environment) as started:
        yield started


def ask(system: RunningSystem, model: str) -> str:
    with system.openai() as client:
        answer = client.chat.completions.create(
            model=model, messages=QUESTION, temperature=0, max_tokens=32
        )
    return str(answer.choices[0].message.content)


def test_every_source_gives_the_same_tokens(
    system: RunningSystem, hub: StandinHub, s3: StandinS3
) -> None:
    system.cli("model", "add", "folder", str(DEMO_FOLDER))
    system.cli("model", "add", "hub", "hf://pilotlight/ember-7m", "--revision", "main")
    system.cli("model", "add", "bucket", "S3://models/demo/ember-7m/")
    known = ask(system, "folder")
    assert "light" in known
    for name in ("hub", "bucket"):
        assert ask(system, name) == known
    # What came over the network for the weights came in ranges, and each byte of the file's data
    # about once.
    with system.admin() as admin:
        copies = admin.get("/nodes").json()["nodes"][0]["copies"]
    assert len({copy["digest"] for copy in copies}) == 3
    assert all(
        "range" in asked.headers
        for asked in (*s3.asked, *hub.cdn.asked)
        if "safetensors" in asked.target
    )


def test_a_source_that_changes_under_the_fetch_is_refused_until_it_is_registered_again(
    system: RunningSystem, s3: StandinS3
) -> None:
    before, after = altered(1), altered(3)
    s3.put("models", "demo/changing", before)
    system.cli("model", "add", "changing", "s3://models/demo/changing")
    asked: list[Asked] = []

    def replace(request: Asked) -> None:
        if "demo/changing/model.safetensors" in request.target:
            asked.append(request)
            if len(asked) == 3:
                s3.put("models", "demo/changing", after)

    s3.on_asked = replace
    with (
        system.openai() as client,
        pytest.raises(Exception, match="Register the model again") as caught,
    ):
        client.chat.completions.create(model="changing", messages=QUESTION, max_tokens=8)
    assert getattr(caught.value, "code", None) == "source_changed"
    assert len(asked) >= 3, "it was replaced while it was read"

    system.cli("model", "rm", "changing")
    system.cli("model", "add", "changing", "s3://models/demo/changing")
    copy = system.home.parent / "copies" / "changing"
    copy.mkdir(parents=True)
    for name, data in after.items():
        (copy / name).write_bytes(data)
    system.cli("model", "add", "copy", str(copy))
    assert ask(system, "changing") == ask(system, "copy")


def altered(by: int) -> dict[str, bytes]:
    """The demo model with other parameters: no copy of it is anywhere yet."""
    weights = FILES["model.safetensors"]
    return {**FILES, "model.safetensors": weights[:-2] + bytes([weights[-2] ^ by]) + weights[-1:]}
