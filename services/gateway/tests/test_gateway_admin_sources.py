"""Registration from a bucket and from a hub: what is read, what is pinned, and what a wrong place
is told.
"""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from sqlalchemy import URL
from standin_s3 import ACCESS_KEY, SECRET_KEY, StandinS3, running_s3
from standin_sources import Fault, StandinHub, running_hub

from pilotlight.checkpoint.manifest import decode
from pilotlight.common.store import manifest_key, text_key
from pilotlight.common.testing import DatabaseSettingsOf, MakeContext
from pilotlight.gateway.admin.testing import (
    SLO,
    AdminWorld,
    admin_world,
    checkpoint_files,
    emptied,
    settings_in,
    write_folder,
)

pytestmark = pytest.mark.anyio
TOKEN = "hf_for_these_tests"


@pytest.fixture
def hub() -> Iterator[StandinHub]:
    with running_hub(checkpoint_files(), token=TOKEN) as running:
        yield running


@pytest.fixture
def s3() -> Iterator[StandinS3]:
    with running_s3("models") as running:
        running.put("models", "team/tiny", checkpoint_files())
        yield running


@pytest.fixture
async def world(
    make_context: MakeContext,
    database_settings: DatabaseSettingsOf,
    module_database: URL,
    tmp_path: Path,
    hub: StandinHub,
    s3: StandinS3,
) -> AsyncIterator[AdminWorld]:
    emptied(module_database)
    settings = settings_in(tmp_path, database_settings("gateway").database_url)
    for name, content in {
        "s3-access-key": ACCESS_KEY,
        "s3-secret-key": SECRET_KEY,
        "hub-token": TOKEN,
    }.items():
        (tmp_path / name).write_text(content)
    roots = f"{settings.model_roots}, s3://models/team, s3://nobodys, hf://org"
    changes = {
        "model_roots": roots,
        "s3_endpoint": s3.url,
        "s3_allow_http": True,
        "hub_endpoint": hub.url,
        "hub_private_hosts": f"127.0.0.1:{hub.cdn.port}",
    }
    async with admin_world(make_context("gateway", settings.model_copy(update=changes))) as made:
        yield made


async def register(
    world: AdminWorld, uri: str, name: str = "tiny", **changes: Any
) -> httpx2.Response:
    return await world.http.post("/models", json={"name": name, "uri": uri, "slo": SLO, **changes})


async def test_a_bucket(world: AdminWorld, s3: StandinS3) -> None:
    answer = await register(world, "S3://models/team/tiny/")
    assert answer.status_code == 201, answer.text
    body = answer.json()
    assert (body["uri"], body["revision"]) == ("s3://models/team/tiny", None)
    manifest = decode(await world.context.store.get(manifest_key(body["digest"])))
    assert await world.context.store.exists(text_key(body["text_digest"]))
    assert {file.version[:5] for file in manifest.files} == {"etag-"}
    entry = world.catalog.get("tiny")
    assert entry is not None
    # Every read is of a range, and pinned; of the weights it is the header.
    read = [asked for asked in s3.asked if asked.target.endswith((".safetensors", ".json"))]
    assert read
    assert all("range" in asked.headers and "if-match" in asked.headers for asked in read)
    s3.put("models", "team/tiny", checkpoint_files(rope_theta=5.0))
    assert (await register(world, "s3://models/team/tiny", "again")).json()[
        "source_version"
    ] != body["source_version"]


async def test_the_weights_are_not_read(world: AdminWorld, s3: StandinS3, hub: StandinHub) -> None:
    big = checkpoint_files(hidden_size=512, intermediate_size=2048)
    weights = "model.safetensors"
    assert len(big[weights]) > 4_000_000
    s3.put("models", "team/big", big)
    hub.push(big)
    for uri, server in (("s3://models/team/big", s3), ("hf://org/name", hub.cdn)):
        assert (await register(world, uri, uri.partition(":")[0])).status_code == 201
        ranges = [
            asked.headers["range"]
            for asked in server.asked
            if weights in asked.target or "blobs" in asked.target
        ]
        longest = max(int(asked.rpartition("-")[2]) for asked in ranges)
        assert longest < 100_000


async def test_a_hub(world: AdminWorld, hub: StandinHub) -> None:
    commit = hub.refs["main"]
    answer = await register(world, "hf://org/name")
    assert answer.status_code == 201, answer.text
    body = answer.json()
    assert (body["uri"], body["revision"]) == (f"hf://org/name@{commit}", "main")
    manifest = decode(await world.context.store.get(manifest_key(body["digest"])))
    assert {file.version[:7] for file in manifest.files} == {"sha256-"}
    # The branch moves on with other weights: it is another model under another name, and the first
    # is what it was.
    hub.push(checkpoint_files(hidden_size=64))
    other = (await register(world, "hf://org/name", "other", revision="main")).json()
    assert other["digest"] != body["digest"]
    same = (await register(world, f"hf://org/name@{commit}", "same")).json()
    assert (same["digest"], same["uri"]) == (body["digest"], body["uri"])


async def test_what_the_same_bytes_are_called(world: AdminWorld) -> None:
    """A hub tells what a file holds, a folder and a bucket only that it is still the same: their
    digests differ, the layout does not.
    """
    folder = write_folder(world.context.settings.roots().folders[0] / "tiny", checkpoint_files())
    bodies = [
        (await register(world, uri, f"m{number}")).json()
        for number, uri in enumerate((folder.as_uri(), "s3://models/team/tiny", "hf://org/name"))
    ]
    assert len({body["digest"] for body in bodies}) == 3
    assert len({body["text_digest"] for body in bodies}) == 1
    manifests = [
        decode(await world.context.store.get(manifest_key(body["digest"]))) for body in bodies
    ]
    assert len({(manifest.spec, manifest.parts) for manifest in manifests}) == 1


@pytest.mark.parametrize(
    ("uri", "status", "code", "told"),
    [
        ("s3://models/other/tiny", 422, "uri_not_allowed", "PILOTLIGHT_MODEL_ROOTS"),
        ("s3://models/team2/tiny", 422, "uri_not_allowed", "PILOTLIGHT_MODEL_ROOTS"),
        ("s3://models/team/../other", 422, "uri_not_allowed", "`..`"),
        ("s3://key:secret@models/team/tiny", 422, "uri_not_allowed", "secrets"),
        ("s3://models/team/tiny?endpoint=http://x", 422, "uri_not_allowed", "settings"),
        ("hf://others/name", 422, "uri_not_allowed", "hf://org"),
        ("hf://org", 422, "uri_not_allowed", "org/name"),
        ("ftp://org/name", 422, "uri_not_allowed", "s3://bucket/prefix"),
        ("s3://nobodys/tiny", 422, "bad_checkpoint", "there is no bucket s3://nobodys"),
        ("s3://models/team/nothing", 422, "bad_checkpoint", "there is nothing below"),
        ("hf://org/missing", 422, "bad_checkpoint", "RepoNotFound"),
        ("hf://org/name@missing", 422, "bad_checkpoint", "RevisionNotFound"),
    ],
)
async def test_a_wrong_place_is_told(
    world: AdminWorld, uri: str, status: int, code: str, told: str
) -> None:
    answer = await register(world, uri)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, "uri"), error
    assert told in error["message"]
    assert "secret@" not in error["what_to_do"]
    assert (await world.http.get("/models")).json() == {"models": []}


@pytest.mark.parametrize("uri", ["s3://models/team/tiny", "hf://org/name"])
async def test_who_refuses_us_is_told(
    world: AdminWorld, s3: StandinS3, hub: StandinHub, uri: str
) -> None:
    server = s3 if uri.startswith("s3") else hub
    server.faults.append(Fault("", "status", 403, times=99))
    answer = await register(world, uri)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "source_denied")
    assert "credentials" in answer.json()["error"]["what_to_do"]
    assert TOKEN not in answer.text
    assert SECRET_KEY not in answer.text


async def test_a_revision_is_the_hubs_alone(world: AdminWorld) -> None:
    for uri, revision in (
        ("s3://models/team/tiny", "main"),
        ("hf://org/name@main", "v1"),
        ("hf://org/name", "a b"),
    ):
        error = (await register(world, uri, revision=revision)).json()["error"]
        assert (error["code"], error["param"]) == ("unprocessable", "revision")
