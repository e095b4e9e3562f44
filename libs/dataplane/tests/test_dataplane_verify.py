"""One pass over a model's files: the digests of its chunks, whatever they were broken into, and
what is wrong.
"""

import random
from collections.abc import Callable

import pytest
from msgspec import structs

from pilotlight.checkpoint.checkpoint import read_checkpoint, read_chunk
from pilotlight.checkpoint.digests import chunk_digest
from pilotlight.checkpoint.manifest import Manifest
from pilotlight.checkpoint.reader import MemorySource, SourceFile
from pilotlight.checkpoint.testing import tiny_config, tiny_files
from pilotlight.common.errors import SourceChanged
from pilotlight.dataplane.readers import Abandoned, ReadProgress
from pilotlight.dataplane.source_origin import SourceOrigin
from pilotlight.dataplane.verify import ModelReading
from pilotlight.policy.ids import Digest

CONFIG = {"hidden_size": 384, "intermediate_size": 1600, "vocab_size": 512}
STEP = 3_000_000


class NamedByContent(MemorySource):
    """Files whose versions are SHA-256, as a hub names them; ``served`` is what it gives."""

    def __init__(self, files: dict[str, bytes], served: dict[str, bytes] | None = None) -> None:
        import hashlib

        super().__init__(files)
        self.named = {
            name: SourceFile(
                name=name,
                size_bytes=len(data),
                version=f"sha256-{hashlib.sha256(data).hexdigest()}",
            )
            for name, data in files.items()
        }
        self.served = served or files

    def list_files(self) -> tuple[SourceFile, ...]:
        return tuple(self.named[name] for name in sorted(self.named))

    def read_into(self, file, offset, buffers, progress=lambda _: None) -> None:
        for buffer in buffers:
            buffer[:] = self.served[file.name][offset : offset + len(buffer)]
            offset += len(buffer)


def oracle(source: MemorySource, manifest: Manifest) -> dict[tuple[int, int], Digest]:
    return {
        (p, c): chunk_digest(read_chunk(source, manifest, chunk))
        for p, part in enumerate(manifest.parts)
        for c, chunk in enumerate(part.chunks)
    }


def read_all(
    manifest: Manifest, source: MemorySource, break_off: Callable[[], bool] = lambda: False
) -> ModelReading:
    reading = ModelReading(manifest=manifest)
    origin = SourceOrigin(source, manifest, "memory://m")
    while not reading.ended:
        progress = Breaking(break_off)
        try:
            reading.run(origin, STEP, progress)
        except Abandoned:
            continue
    assert reading.done_bytes == reading.total_bytes
    return reading


class Breaking(ReadProgress):
    def __init__(self, break_off: Callable[[], bool]) -> None:
        super().__init__()
        self.break_off = break_off

    def __call__(self, count: int) -> None:
        if self.break_off():
            raise Abandoned


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("kind", [MemorySource, NamedByContent])
@pytest.mark.parametrize("tied", [False, True])
def test_digests_are_those_of_the_chunks_however_often_it_breaks_off(
    shards: int, kind: type[MemorySource], tied: bool
) -> None:
    source = kind(tiny_files(tiny_config(**CONFIG, tie_word_embeddings=tied), shards=shards))
    manifest = read_checkpoint(source).manifest
    rng = random.Random(shards)
    reading = read_all(manifest, source, lambda: rng.random() < 0.2)
    assert reading.found == oracle(source, manifest)
    assert reading.differences(manifest) == []
    known = manifest.with_digests(reading.found)
    assert reading.differences(known) == []
    assert reading.learned(known) == {}
    assert {
        (p, c): digest
        for p, digests in reading.learned(manifest).items()
        for c, digest in enumerate(digests)
    } == reading.found


def test_what_differs_is_named_and_nothing_is_learned_of_it() -> None:
    files = tiny_files(tiny_config(**CONFIG))
    source = MemorySource(files)
    manifest = read_checkpoint(source).manifest
    known = manifest.with_digests(
        {place: digest for place, digest in oracle(source, manifest).items() if place[0] != 0}
    )
    wrong = known.parts[2].chunks[0]
    altered = structs.replace(
        known,
        parts=tuple(
            structs.replace(
                part, chunks=(structs.replace(wrong, digest=Digest("ab" * 32)), *part.chunks[1:])
            )
            if number == 2
            else part
            for number, part in enumerate(known.parts)
        ),
    )
    reading = read_all(manifest, source)
    [told] = reading.differences(altered)
    assert told.startswith(
        f"part 2, bytes [0, {wrong.size_bytes}), from model.safetensors at byte {wrong.segments[0].file_offset}"
    )
    assert reading.learned(altered) == {}
    assert set(reading.learned(known)) == {0}


def test_a_file_that_is_not_what_its_version_names_binds_nobody() -> None:
    files = tiny_files(tiny_config(**CONFIG), shards=2)
    name = max(name for name in files if name.endswith(".safetensors"))
    served = {**files, name: files[name][:-1] + bytes([files[name][-1] ^ 1])}
    manifest = read_checkpoint(NamedByContent(files)).manifest
    reading = read_all(manifest, NamedByContent(files, served))
    assert reading.differences(manifest) == [
        f"{name}: its bytes do not have the digest that was registered"
    ]
    assert reading.learned(manifest) == {}


def test_a_header_that_was_altered_at_registration_is_noticed() -> None:
    files = tiny_files(tiny_config(**CONFIG))
    header = files["model.safetensors"]
    one, other = b"layers.0.self_attn.k_proj", b"layers.0.self_attn.v_proj"
    swapped = (
        header.replace(one, b"#" * len(one)).replace(other, one).replace(b"#" * len(one), other)
    )
    manifest = read_checkpoint(
        NamedByContent(files, {**files, "model.safetensors": swapped})
    ).manifest
    reading = read_all(manifest, NamedByContent(files))
    assert reading.differences(manifest) == ["the headers are not those that were registered"]


def test_a_source_that_changed_is_an_error() -> None:
    files = tiny_files(tiny_config())
    manifest = read_checkpoint(MemorySource(files)).manifest
    changed = MemorySource({**files, "model.safetensors": files["model.safetensors"] + b"x"})
    with pytest.raises(SourceChanged):
        read_all(manifest, changed)
