"""A whole system with a real S3 server: the demo model from a bucket, objects in another one.

Run by ``make test-s3``.
"""

import asyncio
from collections.abc import Iterator

import obstore
import pytest
from ceph_server import ACCESS_KEY, SECRET_KEY, CephServer, missing_programs
from embedded_system import DEMO_FOLDER, RunningSystem, running
from obstore.store import S3Store

from pilotlight.common.bucket import ensure_bucket
from pilotlight.common.s3 import s3_store
from pilotlight.common.settings import S3Settings

pytestmark = [
    pytest.mark.ceph,
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(missing_programs()), reason=f"not installed: {', '.join(missing_programs())}"
    ),
]
QUESTION = [{"role": "user", "content": "What is a pilot light?"}]
FILES = {path.name: path.read_bytes() for path in DEMO_FOLDER.iterdir() if path.is_file()}


@pytest.fixture
def bucket(ceph: CephServer, tmp_path_factory: pytest.TempPathFactory) -> S3Store:
    secrets = tmp_path_factory.mktemp("secrets")
    (secrets / "s3-access-key").write_text(ACCESS_KEY)
    (secrets / "s3-secret-key").write_text(SECRET_KEY)
    settings = S3Settings(s3_endpoint=ceph.url, s3_allow_http=True, secrets_dir=secrets)
    for name in ("registry", "objects"):
        asyncio.run(ensure_bucket(f"s3://{name}", settings))
    return s3_store(settings, "registry")


@pytest.fixture
def system(
    ceph: CephServer, bucket: S3Store, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningSystem]:
    home = tmp_path_factory.mktemp("system")
    home.chmod(0o711)
    secrets = home / "home" / "secrets"
    secrets.mkdir(parents=True)
    (secrets / "s3-access-key").write_text(f"{ACCESS_KEY}\n")
    (secrets / "s3-secret-key").write_text(f"{SECRET_KEY}\n")
    environment = {
        "PILOTLIGHT_MODEL_ROOTS": f"{DEMO_FOLDER},s3://registry",
        "PILOTLIGHT_OBJECT_STORE_URL": "s3://objects/pilotlight",
        "PILOTLIGHT_S3_ENDPOINT": ceph.url,
        "PILOTLIGHT_S3_ALLOW_HTTP": "true",
    }
    with running(home / "home", environment=environment) as started:
        yield started


def upload(bucket: S3Store, prefix: str, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        obstore.put(bucket, f"{prefix}/{name}", data)


def ask(system: RunningSystem, model: str) -> str:
    with system.openai() as client:
        answer = client.chat.completions.create(
            model=model, messages=QUESTION, temperature=0, max_tokens=32
        )
    return str(answer.choices[0].message.content)


def test_a_model_from_a_bucket_gives_the_tokens_of_the_folders(
    system: RunningSystem, bucket: S3Store
) -> None:
    upload(bucket, "ember", FILES)
    system.cli("model", "add", "folder", str(DEMO_FOLDER))
    system.cli("model", "add", "bucket", "s3://registry/ember")
    known = ask(system, "folder")
    assert "light" in known
    assert ask(system, "bucket") == known
    # One that is replaced between its registration and its first request.
    weights = FILES["model.safetensors"]
    before, after = (weights[:-2] + bytes([weights[-2] ^ by]) + weights[-1:] for by in (1, 3))
    upload(bucket, "changing", {**FILES, "model.safetensors": before})
    system.cli("model", "add", "changing", "s3://registry/changing")
    upload(bucket, "changing", {"model.safetensors": after})
    with pytest.raises(Exception, match="Register the model again") as caught:
        ask(system, "changing")
    assert getattr(caught.value, "code", None) == "source_changed"
    system.cli("model", "rm", "changing")
    system.cli("model", "add", "changing", "s3://registry/changing")
    assert ask(system, "changing")
