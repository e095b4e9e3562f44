"""What a real S3 server says: our object store and our sources against Ceph's.

Run by ``make test-s3``.
"""

import asyncio
from pathlib import Path

import obstore
import pytest
from ceph_server import ACCESS_KEY, SECRET_KEY, CephServer, missing_programs
from obstore.store import S3Store

from pilotlight.checkpoint.checkpoint import read_checkpoint
from pilotlight.checkpoint.errors import SourceChanged, SourceDenied, SourceMissing
from pilotlight.checkpoint.reader import MemorySource, Source
from pilotlight.checkpoint.testing import tiny_config, tiny_files
from pilotlight.common.bucket import ensure_bucket
from pilotlight.common.errors import NotFound
from pilotlight.common.errors import SourceDenied as StoreDenied
from pilotlight.common.errors import SourceMissing as StoreMissing
from pilotlight.common.model_roots import ModelRootsSettings
from pilotlight.common.s3 import s3_store
from pilotlight.common.sources.opening import Sources
from pilotlight.common.sources.ranged import Patience
from pilotlight.common.store import ObjectStore
from pilotlight.common.waiting import Backoff

pytestmark = [
    pytest.mark.ceph,
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(missing_programs()), reason=f"not installed: {', '.join(missing_programs())}"
    ),
]
DATA = bytes(range(256)) * 65536
PATIENCE = Patience(stall_timeout_s=10.0, tries=3, backoff=Backoff(first_s=0.01, limit_s=0.05))


@pytest.fixture(scope="module")
def settings(ceph: CephServer, tmp_path_factory: pytest.TempPathFactory) -> ModelRootsSettings:
    folder = tmp_path_factory.mktemp("secrets")
    (folder / "s3-access-key").write_text(ACCESS_KEY)
    (folder / "s3-secret-key").write_text(SECRET_KEY)
    made = ModelRootsSettings(
        s3_endpoint=ceph.url,
        s3_allow_http=True,
        secrets_dir=folder,
        model_roots="s3://models, s3://nobodys",
    )
    assert asyncio.run(ensure_bucket("s3://models/x", made))
    assert not asyncio.run(ensure_bucket("s3://models", made))
    return made


@pytest.fixture(scope="module")
def bucket(settings: ModelRootsSettings) -> S3Store:
    return s3_store(settings, "models")


def opened(settings: ModelRootsSettings, prefix: str) -> Source:
    return Sources(settings, PATIENCE).open(f"s3://models/{prefix}")


def test_a_checkpoint_is_read_range_by_range(settings: ModelRootsSettings, bucket: S3Store) -> None:
    files = tiny_files(tiny_config(), shards=3)
    for name, data in files.items():
        obstore.put(bucket, f"team/tiny/{name}", data)
    obstore.put(bucket, "team/tiny/onnx/model.onnx", b"x")
    obstore.put(bucket, "team/tiny-2/config.json", b"x")
    source = opened(settings, "team/tiny")
    assert [file.name for file in source.list_files()] == sorted(files)
    found, known = read_checkpoint(source), read_checkpoint(MemorySource(files))
    assert [part.tensors for part in found.manifest.parts] == [
        part.tensors for part in known.manifest.parts
    ]
    for file in source.list_files():
        assert source.read(file, 0, file.size_bytes) == files[file.name]
        assert (
            source.read(file, file.size_bytes // 2, 10)
            == files[file.name][file.size_bytes // 2 :][:10]
        )


@pytest.mark.parametrize("multipart", [False, True])
def test_an_object_that_changes_while_it_is_read_is_refused(
    settings: ModelRootsSettings, bucket: S3Store, multipart: bool
) -> None:
    obstore.put(bucket, "changing/a.bin", DATA, use_multipart=multipart, chunk_size=5 * 1024 * 1024)
    source = opened(settings, "changing")
    (a,) = source.list_files()
    into = bytearray(len(DATA))
    source.read_into(a, 0, [memoryview(into)])
    assert into == DATA
    # The same bytes again are the same version, unless they are uploaded in another way.
    if not multipart:
        obstore.put(bucket, "changing/a.bin", DATA, use_multipart=False)
        assert source.read(a, 0, 10) == DATA[:10]
    obstore.put(
        bucket, "changing/a.bin", DATA[::-1], use_multipart=multipart, chunk_size=5 * 1024 * 1024
    )
    with pytest.raises(SourceChanged, match="another one now"):
        source.read(a, 100, 10)
    obstore.put(bucket, "changing/a.bin", DATA[:50], use_multipart=False)
    with pytest.raises(SourceChanged):
        source.read(a, 100, 10)
    obstore.delete(bucket, "changing/a.bin")
    with pytest.raises(SourceChanged, match="gone"):
        source.read(a, 100, 10)


def test_wrong_credentials_and_missing_buckets_are_told_apart(
    settings: ModelRootsSettings, bucket: S3Store, tmp_path: Path
) -> None:
    obstore.put(bucket, "one/a.bin", b"123")
    with pytest.raises(SourceMissing, match="there is no bucket s3://nobodys"):
        Sources(settings, PATIENCE).open("s3://nobodys/x").list_files()
    with pytest.raises(SourceMissing, match="nothing below"):
        opened(settings, "nothing").list_files()
    known = opened(settings, "one").list_files()[0]
    for access, secret in ((ACCESS_KEY, "not-the-secret"), ("AKIANOBODY", SECRET_KEY)):
        (tmp_path / "s3-access-key").write_text(access)
        (tmp_path / "s3-secret-key").write_text(secret)
        source = opened(settings.model_copy(update={"secrets_dir": tmp_path}), "one")
        for ask in (source.list_files, lambda source=source: source.read(known, 0, 3)):
            with pytest.raises(SourceDenied, match="wrong credentials") as caught:
                ask()
            assert secret not in str(caught.value)


@pytest.mark.anyio
async def test_the_object_store(settings: ModelRootsSettings, tmp_path: Path) -> None:
    store = ObjectStore.from_url("s3://models/objects", settings)
    assert await store.put_if_absent("manifests/a.json", b"first")
    assert not await store.put_if_absent("manifests/a.json", b"second")
    assert await store.get("manifests/a.json") == b"first"
    assert await store.exists("manifests/a.json")
    together = await asyncio.gather(
        *(store.put_if_absent("manifests/b.json", b"%d" % number) for number in range(8))
    )
    assert sum(together) == 1
    await store.delete("manifests/a.json")
    assert not await store.exists("manifests/a.json")
    with pytest.raises(NotFound, match=r"manifests/a\.json"):
        await store.get("manifests/a.json")
    elsewhere = ObjectStore.from_url("s3://nobodys/objects", settings)
    with pytest.raises(StoreMissing, match="no such bucket"):
        await elsewhere.put_if_absent("a", b"x")
    with pytest.raises(StoreMissing, match="no such bucket"):
        await elsewhere.get("a")
    (tmp_path / "s3-access-key").write_text(ACCESS_KEY)
    (tmp_path / "s3-secret-key").write_text("wrong")
    denied = ObjectStore.from_url(
        "s3://models/objects", settings.model_copy(update={"secrets_dir": tmp_path})
    )
    with pytest.raises(StoreDenied, match="403"):
        await denied.get("manifests/b.json")
