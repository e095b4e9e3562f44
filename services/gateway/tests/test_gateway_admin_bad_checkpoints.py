"""Folders that registration refuses, for what is in them or where they are: at once, with the right
status, saying what to do, and leaving nothing behind.
"""

import asyncio
import json
import os
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from pilotlight.checkpoint.testing import frame_header, tiny_config, tiny_files
from pilotlight.gateway.admin.testing import (
    VOCAB_SIZE,
    AdminWorld,
    checkpoint_files,
    nothing_is_registered,
    refused,
    write_folder,
)

pytestmark = pytest.mark.anyio

WEIGHTS = "model.safetensors"
Files = dict[str, bytes]


@pytest.fixture
async def world(fresh_admin: AdminWorld) -> AsyncIterator[AdminWorld]:
    yield fresh_admin
    await nothing_is_registered(fresh_admin)


def without(name: str) -> Callable[[Files], None]:
    return lambda files: files.__delitem__(name)


def cut(name: str, keep: int) -> Callable[[Files], None]:
    return lambda files: files.update({name: files[name][:keep]})


def put(name: str, content: bytes) -> Callable[[Files], None]:
    return lambda files: files.update({name: content})


def config(**changes: Any) -> Callable[[Files], None]:
    return put(
        "config.json", json.dumps(tiny_config(**{"vocab_size": VOCAB_SIZE, **changes})).encode()
    )


def lying_header(change: Callable[[dict[str, Any]], object]) -> Callable[[Files], None]:
    """Change one tensor's entry in the header, and nothing else."""

    def apply(files: Files) -> None:
        data = files[WEIGHTS]
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        change(header["model.norm.weight"])
        files[WEIGHTS] = frame_header(json.dumps(header).encode()) + data[8 + length :]

    return apply


def tokenizer(**changes: Any) -> Callable[[Files], None]:
    def apply(files: Files) -> None:
        files["tokenizer.json"] = json.dumps(
            {**json.loads(files["tokenizer.json"]), **changes}
        ).encode()

    return apply


PANICS = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
HUGE = b"{{ 'x'|center(400000000) }}"
"""Jinja would compute this while it compiles."""


def pickled(files: Files) -> None:
    del files[WEIGHTS]
    files["pytorch_model.bin"] = b"\x80\x02}q\x00."


@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        (without("config.json"), "bad_checkpoint", ["config.json"]),
        (without(WEIGHTS), "bad_checkpoint", ["safetensors"]),
        (without("tokenizer.json"), "bad_checkpoint", ["tokenizer.json"]),
        (cut(WEIGHTS, -1), "bad_checkpoint", [WEIGHTS]),
        (cut(WEIGHTS, 100), "bad_checkpoint", [WEIGHTS]),
        (cut(WEIGHTS, 3), "bad_checkpoint", [WEIGHTS]),
        (cut(WEIGHTS, 0), "bad_checkpoint", [WEIGHTS]),
        (put(WEIGHTS, struct.pack("<Q", 1 << 63) + b"{}"), "bad_checkpoint", [WEIGHTS]),
        (put(WEIGHTS, b"\xff" * 64), "bad_checkpoint", [WEIGHTS]),
        (put(WEIGHTS, frame_header(b"[" * 5000)), "bad_checkpoint", [WEIGHTS]),
        (
            lying_header(lambda entry: entry.update(data_offsets=[0, 1 << 60])),
            "bad_checkpoint",
            [WEIGHTS],
        ),
        (
            lying_header(lambda entry: entry.update(data_offsets=[0, 64])),
            "bad_checkpoint",
            [WEIGHTS],
        ),
        (lying_header(lambda entry: entry.update(shape=[1 << 40])), "bad_checkpoint", [WEIGHTS]),
        (lying_header(lambda entry: entry.update(shape=[-32])), "bad_checkpoint", [WEIGHTS]),
        (lying_header(lambda entry: entry.update(dtype="I64")), "bad_checkpoint", [WEIGHTS]),
        (tokenizer(normalizer=PANICS), "bad_checkpoint", ["tokenizer.json", "charsmap"]),
        (put("chat_template.jinja", HUGE), "bad_checkpoint", ["chat template", "16777216"]),
        (pickled, "unsupported_model", ["pytorch_model.bin", "safetensors"]),
        (config(architectures=["GPT2LMHeadModel"]), "unsupported_model", ["GPT2LMHeadModel"]),
        (config(quantization_config={"quant_method": "gptq"}), "unsupported_model", ["quant"]),
        (config(hidden_size=64), "bad_checkpoint", []),
        (config(num_hidden_layers=3), "bad_checkpoint", []),
        (config(num_hidden_layers=10**9), "bad_checkpoint", []),
        (config(vocab_size=-1), "bad_checkpoint", ["vocab_size"]),
        (put("config.json", b"{"), "bad_checkpoint", ["config.json"]),
        (put("config.json", b"[" * 100_000), "bad_checkpoint", ["config.json"]),
        (put("config.json", b" " * (17 << 20)), "bad_checkpoint", ["config.json"]),
        (put("config.json", b"\xff\xfe"), "bad_checkpoint", ["config.json"]),
        (put("tokenizer.json", b"{}"), "bad_checkpoint", ["tokenizer.json"]),
        (put("tokenizer.json", b"\xff"), "bad_checkpoint", ["tokenizer.json"]),
        (put("tokenizer_config.json", b'{"chat_template": "{% if %}"}'), "bad_checkpoint", []),
        (put("tokenizer_config.json", b"[]"), "bad_checkpoint", ["tokenizer_config.json"]),
    ],
)
async def test_a_checkpoint_that_will_not_do(
    world: AdminWorld, damage: Callable[[Files], None], code: str, words: list[str]
) -> None:
    files = checkpoint_files()
    damage(files)
    async with asyncio.timeout(60):
        answer = await world.register(write_folder(world.models / "bad", files))
    refused(answer, 422, code, *words)


async def test_a_tokenizer_of_another_model(world: AdminWorld) -> None:
    files = checkpoint_files()
    files.update(tiny_files(tiny_config(vocab_size=96)))
    refused(
        await world.register(write_folder(world.models / "bad", files)),
        422,
        "bad_checkpoint",
        "vocab_size",
        "tokenizer.json",
    )


async def test_a_missing_shard_is_named(world: AdminWorld) -> None:
    files = checkpoint_files()
    del files[WEIGHTS]
    files.update(tiny_files(tiny_config(vocab_size=VOCAB_SIZE), shards=3))
    del files["model-00002-of-00003.safetensors"]
    answer = await world.register(write_folder(world.models / "bad", files))
    refused(answer, 422, "bad_checkpoint", "model-00002-of-00003.safetensors")


async def test_a_huge_tokenizer_is_not_read(world: AdminWorld) -> None:
    folder = write_folder(world.models / "bad", checkpoint_files())
    os.truncate(folder / "tokenizer.json", 1 << 40)
    async with asyncio.timeout(30):
        refused(await world.register(folder), 422, "bad_checkpoint", "tokenizer.json")


async def test_what_is_no_file_is_not_waited_for(world: AdminWorld) -> None:
    files = checkpoint_files()
    del files[WEIGHTS]
    folder = write_folder(world.models / "bad", files)
    os.mkfifo(folder / WEIGHTS)
    async with asyncio.timeout(30):
        refused(await world.register(folder), 422, "bad_checkpoint")


async def test_files_outside_the_roots_are_not_read(world: AdminWorld, tmp_path: Path) -> None:
    outside = write_folder(tmp_path / "outside", checkpoint_files())
    folder = world.models / "linked"
    folder.mkdir()
    for file in outside.iterdir():
        (folder / file.name).symlink_to(file)
    refused(await world.register(folder), 422, "uri_not_allowed", "link")


OUTSIDE = [
    "s3://bucket/model",
    "http://host/model",
    "https://127.0.0.1/",
    "hf://org/name",
    "file://otherhost{inside}",
    "relative/folder",
    "./models/tiny",
    "tiny",
    "file:tiny",
    "file:///etc",
    "file:///",
    "/",
    "//host{inside}",
    "file://{inside}/../..",
    "{inside}/../../outside",
    "file://{inside}/%2e%2e/%2e%2e/outside",
    "file://{escape}",
    "{escape}",
    "file://{inside}/%00",
    "file://{inside}%00/../../..",
    "{root}-sibling",
    "http://[",
    "x" * 2048,
    "file:///" + "x" * 2000,
    " {inside}",
    "\n{inside}",
    "FILE+x://{inside}",
]


async def test_uris_outside_the_roots(world: AdminWorld, tmp_path: Path) -> None:
    inside = write_folder(world.models / "tiny", checkpoint_files())
    outside = write_folder(tmp_path / "outside", checkpoint_files())
    write_folder(tmp_path / "models-sibling", checkpoint_files())
    escape = world.models / "escape"
    escape.symlink_to(outside)
    for uri in OUTSIDE:
        answer = await world.register(
            inside, uri=uri.format(inside=inside, escape=escape, root=world.models)
        )
        refused(answer, 422, "uri_not_allowed")
        assert "PILOTLIGHT_MODEL_ROOTS" in answer.json()["error"]["what_to_do"]


@pytest.mark.parametrize(
    "uri",
    [
        "{root}/missing",
        "file://{root}/x{long}",
        "{root}/circle",
        "{inside}/config.json",
        "{root}/tiny/config.json/x",
    ],
)
async def test_uris_of_no_folder(world: AdminWorld, uri: str) -> None:
    inside = write_folder(world.models / "tiny", checkpoint_files())
    (world.models / "circle").symlink_to(world.models / "circle")
    uri = uri.format(inside=inside, root=world.models, long="y" * 300)
    refused(await world.register(inside, uri=uri), 422, "bad_checkpoint", "folder")


async def test_an_empty_folder(world: AdminWorld) -> None:
    refused(
        await world.register(write_folder(world.models / "bad", {})),
        422,
        "bad_checkpoint",
        "config.json",
    )
