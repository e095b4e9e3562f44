"""Headers that lie, a hundred thousand of them: a typed error or what the safetensors library
reads, and no memory on their word.
"""

import json
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import hostile_headers
import pytest
from hostile_headers import KINDS, CheckedSource, framed, hostile, judge, parsed
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.checkpoint import safetensors as under_test
from pilotlight.checkpoint.checkpoint import read_checkpoint
from pilotlight.checkpoint.errors import BadCheckpoint, CheckpointError
from pilotlight.checkpoint.reader import MemorySource
from pilotlight.checkpoint.safetensors import SINGLE_FILE, read_tensors
from pilotlight.checkpoint.strict_json import parse_object
from pilotlight.checkpoint.testing import encode_safetensors, frame_header, tiny_config, tiny_files

HEADERS = 100_000
BOMB_BYTES = 256 * 1024
MEMORY_FACTOR = 16
"""Memory that a parse takes at most, in sizes of the file; metadata of many short strings is the
dearest."""
MEMORY_BYTES = 64 * 1024


@pytest.mark.slow
def test_a_hundred_thousand_hostile_headers_are_read_rightly_or_refused():
    """In a process that may take 32 MiB beyond what it starts with."""
    done = subprocess.run(
        [sys.executable, hostile_headers.__file__, "0", str(HEADERS)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    tally: dict[str, int] = json.loads(done.stdout)
    verdicts = {
        verdict: sum(tally.get(f"{kind} {verdict}", 0) for kind in KINDS)
        for verdict in ("right", "refused", "stricter")
    }
    assert sum(verdicts.values()) == HEADERS
    assert verdicts["right"] > HEADERS // 10
    # Each way to lie is found out, and each reason to be stricter than the library has had its
    # case.
    assert all(tally.get(f"{kind} refused") for kind in KINDS)
    assert {
        verdict.removeprefix("stricter: ") for verdict in tally if verdict.startswith("stricter: ")
    } == set(hostile_headers.STRICTER)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(
    st.integers(0, 2**32),
    st.lists(st.tuples(st.integers(0, 4095), st.binary(max_size=3)), max_size=3),
)
def test_what_is_hostile_twice_over_is_read_rightly_or_refused(
    seed: int, cuts: list[tuple[int, bytes]]
):
    _, data = hostile(seed)
    for place, splice in cuts:
        place %= len(data) + 1
        data = data[:place] + splice + data[place + len(splice) :]
    judge(data)


def peak_bytes(data: bytes, parse: Callable[[bytes], object] = parsed) -> int:
    tracemalloc.start()
    try:
        parse(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_no_header_takes_more_memory_than_a_few_times_its_file():
    for seed in range(4000):
        kind, data = hostile(seed)
        assert peak_bytes(data) <= MEMORY_BYTES + MEMORY_FACTOR * len(data), (seed, kind)


def many(
    unit: str, header: str = '{{"a":{{"dtype":"F32","shape":[{}],"data_offsets":[0,0]}}}}'
) -> bytes:
    return header.format(
        ",".join(
            unit % number if "%" in unit else unit
            for number in range(BOMB_BYTES // (len(unit) + 1))
        )
    ).encode()


BOMBS = {
    "lists": many("[]"),
    "objects": many("{}"),
    "objects in objects": many('{"":0}'),
    "numbers": many("0.5"),
    "strings": many('"ab"'),
    "members": many('"%x":0', "{{{}}}"),
    "members of members": many('"%x":{{}}', "{{{}}}"),
    "a tensor's members": many('"%x":0', '{{"a":{{{}}}}}'),
    "metadata": many('"%x":""', '{{"__metadata__":{{{}}}}}'),
    "metadata of lists": many("[]", '{{"__metadata__":{{"a":[{}]}}}}'),
    "a name": b'{"' + b"x" * BOMB_BYTES + b'":1}',
    "a name of wide characters": b'{"' + b"x" * BOMB_BYTES + "\U0001f600".encode() + b'":1}',
    "nothing": b"{" + b" " * BOMB_BYTES,
    "depth": b'{"a":' * (BOMB_BYTES // 5),
    "a number": b'{"a":' + b"9" * BOMB_BYTES + b"}",
    "empty tensors": json.dumps(
        {f"{n:x}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for n in range(4_000)}
    ).encode(),
}


@pytest.mark.slow
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_header_of_countless_values_is_never_made_of_objects(bomb: str):
    data = frame_header(BOMBS[bomb])
    assert peak_bytes(data) <= MEMORY_BYTES + MEMORY_FACTOR * len(data)
    # The plain way would not have: this is what the test measures.
    assert bomb != "objects" or peak_bytes(
        BOMBS[bomb], lambda raw: parse_object(raw, "f")
    ) > MEMORY_FACTOR * len(data)


def test_an_index_of_countless_values_is_never_made_of_objects():
    def parse(data: bytes) -> None:
        with pytest.raises(BadCheckpoint):
            read_tensors(
                source := MemorySource({under_test.INDEX_FILE: data}),
                {file.name: file for file in source.list_files()},
            )

    for bomb in (
        BOMBS["lists"],
        BOMBS["members of members"],
        many("{}", '{{"weight_map":{{"a":[{}]}}}}'),
        many('"%x":{{"a":{{}}}}', "{{{}}}"),
    ):
        assert peak_bytes(bomb, parse) <= 2 * BOMB_BYTES + MEMORY_FACTOR * len(bomb)


@pytest.mark.parametrize("claim", [1 << 20, 1 << 26, 1 << 40, (1 << 64) - 1])
def test_a_length_that_is_claimed_is_not_taken(claim: int):
    data = claim.to_bytes(8, "little") + b"{}"
    assert peak_bytes(data) <= MEMORY_BYTES
    assert "claims" in str(parsed(data))


def test_a_sparse_file_gives_no_more_than_a_header(tmp_path: Path):
    """Its size is no reason to read it."""

    class Sparse(CheckedSource):
        def __init__(self) -> None:
            super().__init__(b"")
            self.file = under_test.SourceFile(name="f", size_bytes=1 << 50, version="")
            self.asked = 0

        def read_into(self, file, offset, buffers, progress=None):
            self.asked += sum(map(len, buffers))
            if offset == 0:
                buffers[0][:8] = (under_test.MAX_HEADER_BYTES + 1).to_bytes(8, "little")

    source = Sparse()
    with pytest.raises(BadCheckpoint, match="at most"):
        under_test.read_header(source, source.file)
    assert source.asked == under_test.FIRST_READ_BYTES


def test_tensors_are_counted_over_all_shards(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(under_test, "MAX_TENSORS", 3)
    shards = {
        "one": encode_safetensors([("a", (1,)), ("b", (1,))]),
        "two": encode_safetensors([("c", (1,)), ("d", (1,))]),
    }

    def read(names: str):
        weight_map = {name: "one" if name in "ab" else "two" for name in names}
        source = MemorySource(
            {**shards, under_test.INDEX_FILE: json.dumps({"weight_map": weight_map}).encode()}
        )
        return read_tensors(source, {file.name: file for file in source.list_files()})

    assert len(read("ab")) == 2
    with pytest.raises(BadCheckpoint, match="more than 3 tensors"):
        read("abcd")


@pytest.mark.slow
def test_registration_of_a_hostile_checkpoint_ends_in_a_typed_error_or_in_a_sound_manifest():
    """All the way to the layout, where a tensor's place is believed."""
    files = tiny_files(tiny_config())
    whole = files[SINGLE_FILE]
    size_bytes = 8 + int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8:size_bytes]), whole[size_bytes:]
    expected = read_checkpoint(MemorySource(files)).manifest
    rng, sound, refused = random.Random(7), 0, 0
    names = [name for name in header if name != "__metadata__"]
    for _ in range(1500):
        lying = json.loads(json.dumps(header))
        one, other = rng.sample(names, 2)
        match rng.randrange(6):
            case 0:
                lying[one]["data_offsets"], lying[other]["data_offsets"] = (
                    lying[other]["data_offsets"],
                    lying[one]["data_offsets"],
                )
            case 1:
                lying[one]["dtype"] = rng.choice(hostile_headers.DTYPES)
            case 2:
                lying[one]["shape"] = rng.choice(
                    ([], [0], lying[one]["shape"][::-1], lying[other]["shape"], [1 << 40] * 8)
                )
            case 3:
                del lying[one]
            case 4:
                lying[one + ".extra"] = lying[one]
            case _:
                lying = dict(rng.sample(list(lying.items()), len(lying)))
        raw = framed(json.dumps(lying).encode(), data)
        try:
            manifest = read_checkpoint(MemorySource({**files, SINGLE_FILE: raw})).manifest
        except CheckpointError:
            refused += 1
            continue
        sound += 1
        assert manifest.parts[0].image_bytes == expected.parts[0].image_bytes
        for part in manifest.parts:
            ends = [0]
            for tensor in part.tensors:
                assert tensor.image_offset >= ends[-1]
                ends.append(tensor.image_offset + tensor.size_bytes)
            assert ends[-1] <= part.image_bytes
    assert refused > 500
    assert sound > 200
