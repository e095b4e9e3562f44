from pathlib import Path

import pytest

from pilotlight.common import store as store_module
from pilotlight.common.errors import BadRequest, NotFound, SourceUnavailable
from pilotlight.common.store import ObjectStore, artifact_key, manifest_key, text_key
from pilotlight.policy.ids import Digest

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return ObjectStore.from_url(
        f"file://{tmp_path}/objects" if request.param == "file" else "memory://"
    )


async def test_an_object_is_written_once(store: ObjectStore) -> None:
    key = manifest_key(Digest("ab"))
    assert not await store.exists(key)
    assert await store.put_if_absent(key, b"first")
    assert not await store.put_if_absent(key, b"second")
    assert await store.get(key) == b"first"
    assert await store.exists(key)


async def test_a_missing_object_is_told(store: ObjectStore) -> None:
    with pytest.raises(NotFound, match="text/ab"):
        await store.get(text_key(Digest("ab")))
    await store.delete(text_key(Digest("ab")))


async def test_a_removed_object_is_gone(store: ObjectStore) -> None:
    await store.put_if_absent(artifact_key(Digest("ab")), b"x" * 1_000_000)
    await store.delete(artifact_key(Digest("ab")))
    assert not await store.exists(artifact_key(Digest("ab")))


async def test_a_broken_store_is_told(tmp_path: Path) -> None:
    store = ObjectStore.from_url(f"file://{tmp_path}/objects")
    (tmp_path / "objects" / "text").write_text("a file where a folder should be")
    with pytest.raises(SourceUnavailable):
        await store.put_if_absent(text_key(Digest("ab")), b"x")


async def test_a_store_that_hangs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "DEADLINE_S", 0.0)
    with pytest.raises(SourceUnavailable):
        await ObjectStore.from_url("memory://").get("x")


@pytest.mark.parametrize("url", ["", "ftp://x", "file://", "/folder", "s3://"])
def test_other_places_are_refused(url: str) -> None:
    with pytest.raises(BadRequest, match="object store"):
        ObjectStore.from_url(url)


def test_keys_say_what_they_hold() -> None:
    assert (manifest_key(Digest("d")), text_key(Digest("d")), artifact_key(Digest("d"))) == (
        "manifests/d.json",
        "text/d.json",
        "artifacts/d",
    )
