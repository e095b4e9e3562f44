"""The manifest: every byte once, a stable digest, and no trust in decoded bytes."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.checkpoint import layout
from pilotlight.checkpoint.checkpoint import read_checkpoint, read_chunk
from pilotlight.checkpoint.errors import BadCheckpoint
from pilotlight.checkpoint.manifest import (
    ALIGNMENT_BYTES,
    CHUNK_BYTES,
    Manifest,
    bytes_digest,
    decode,
    encode,
)
from pilotlight.checkpoint.reader import MemorySource
from pilotlight.checkpoint.safetensors import INDEX_FILE
from pilotlight.checkpoint.testing import (
    encode_safetensors,
    tensor_bytes,
    tiny_config,
    tiny_files,
    tiny_tensors,
)
from pilotlight.policy.model import Dtype

GOLDEN = {
    ("LlamaForCausalLM", 1): "1ac689a9fb8b3004def3446b8eb10069e238a8c8c087751e1b6a7d976930d10c",
    ("Qwen2ForCausalLM", 3): "f27e614cfc0837f336f4e9ba6c6567c0f362f30614a8492ed78be4aabdbec48a",
}
CONFIGS = [
    tiny_config(),
    tiny_config("Qwen2ForCausalLM"),
    tiny_config(attention_bias=True),
    tiny_config("Qwen2ForCausalLM", tie_word_embeddings=True),
    tiny_config("Qwen3MoeForCausalLM", mlp_only_layers=[0]),
    tiny_config("Gemma3ForCausalLM"),
    tiny_config(hidden_size=36, num_attention_heads=2, intermediate_size=7, vocab_size=5),
]


def read(config, dtype=Dtype.BFLOAT16, shards=1) -> tuple[MemorySource, Manifest]:
    source = MemorySource(tiny_files(config, dtype, shards))
    return source, read_checkpoint(source).manifest


def image(source, manifest, part) -> bytes:
    return b"".join(read_chunk(source, manifest, chunk) for chunk in part.chunks)


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 1,000 bytes: cuts fall inside tensors, and not at multiples of the alignment."""
    monkeypatch.setattr(layout, "CHUNK_BYTES", 1000)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_byte_lies_in_exactly_one_segment(config, shards, small_chunks):
    source, manifest = read(config, shards=shards)
    covered = [bytearray(file.size_bytes) for file in manifest.files]
    for part in manifest.parts:
        for chunk in part.chunks:
            for segment in chunk.segments:
                for place in range(segment.file_offset, segment.file_offset + segment.size_bytes):
                    covered[segment.file][place] += 1
    for file, counts in zip(manifest.files, covered, strict=True):
        header_bytes = 8 + int.from_bytes(source.read(file, 0, 8), "little")
        assert set(counts[:header_bytes]) == {0}
        assert set(counts[header_bytes:]) == {1}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.FLOAT64])
@pytest.mark.parametrize("shards", [1, 3])
def test_images_hold_the_tensors_and_zeros_between_them(config, dtype, shards, small_chunks):
    source, manifest = read(config, dtype, shards)
    seen: dict[str, tuple[int, ...]] = {}
    for part in manifest.parts:
        data = image(source, manifest, part)
        assert len(data) == part.image_bytes
        end = 0
        for tensor in part.tensors:
            assert tensor.image_offset % ALIGNMENT_BYTES == 0
            assert not any(data[end : tensor.image_offset])
            end = tensor.image_offset + tensor.size_bytes
            assert data[tensor.image_offset : end] == tensor_bytes(tensor.name, tensor.size_bytes)
            seen[tensor.name] = tensor.shape
        assert not any(data[end:])
    assert seen == tiny_tensors(config, dtype)


def test_spec_and_parts_agree_on_sizes():
    _, manifest = read(tiny_config())
    assert manifest.spec.part_bytes == tuple(part.image_bytes for part in manifest.parts)


def test_a_part_is_laid_out_in_the_order_of_the_file():
    _, manifest = read(tiny_config(), shards=3)
    for part in manifest.parts:
        segments = [segment for chunk in part.chunks for segment in chunk.segments]
        assert segments == sorted(segments, key=lambda segment: (segment.file, segment.file_offset))


def test_adjacent_tensors_become_one_segment():
    _, manifest = read(tiny_config())
    assert [len(part.chunks[0].segments) for part in manifest.parts] == [1, 1, 1, 1]


def test_a_long_image_is_cut_into_chunks():
    config = tiny_config(vocab_size=70_000, num_hidden_layers=1, hidden_size=64)
    source, manifest = read(config)
    embedding = manifest.parts[0]
    assert [chunk.size_bytes for chunk in embedding.chunks] == [
        CHUNK_BYTES,
        70_000 * 64 * 2 - CHUNK_BYTES,
    ]
    assert image(source, manifest, embedding) == tensor_bytes(
        "model.embed_tokens.weight", 70_000 * 64 * 2
    )


@pytest.mark.parametrize(("architecture", "shards"), GOLDEN)
def test_the_digest_is_the_same_in_every_release(architecture, shards):
    _, manifest = read(tiny_config(architecture), shards=shards)
    assert manifest.digest() == GOLDEN[architecture, shards]


def test_a_release_that_knows_fewer_fields_keeps_the_digest_or_refuses():
    def without_later_fields(manifest):
        fields = json.loads(encode(manifest))
        for name in (
            "sliding_window_tokens",
            "sliding_layers",
            "sliding_rope_theta",
            "attention_scale",
            "logit_softcap",
            "experts",
        ):
            del fields["spec"][name]
        return decode(json.dumps(fields).encode()).digest()

    plain, sliding = (
        read(config)[1]
        for config in (tiny_config(), tiny_config("MistralForCausalLM", sliding_window=8))
    )
    assert without_later_fields(plain) == plain.digest()
    assert without_later_fields(sliding) != sliding.digest()


def test_round_trip():
    source, manifest = read(tiny_config())
    assert decode(encode(manifest)) == manifest
    digest = bytes_digest(read_chunk(source, manifest, manifest.parts[2].chunks[0]))
    known = manifest.with_digests({(2, 0): digest})
    assert decode(encode(known)) == known
    assert known.parts[2].chunks[0].digest == digest
    assert known.parts[1] == manifest.parts[1]


def test_chunk_digests_do_not_change_the_manifests_digest():
    _, manifest = read(tiny_config())
    assert manifest.with_digests({(0, 0): bytes_digest(b"x")}).digest() == manifest.digest()


def test_a_recorded_digest_is_never_replaced():
    _, manifest = read(tiny_config())
    known = manifest.with_digests({(0, 0): bytes_digest(b"x")})
    assert known.with_digests({(0, 0): bytes_digest(b"x")}) == known
    with pytest.raises(BadCheckpoint, match="chunk 0 of part 0"):
        known.with_digests({(0, 0): bytes_digest(b"y")})
    with pytest.raises(KeyError):
        manifest.with_digests({(0, 9): bytes_digest(b"x")})


def test_unknown_fields_are_ignored():
    _, manifest = read(tiny_config())
    fields = json.loads(encode(manifest))
    assert decode(json.dumps({**fields, "later": 1}).encode()) == manifest


def _without_last_chunk(part):
    part["chunks"].pop()


def _chunk(**changes):
    return lambda part: part["chunks"][0].update(changes)


def _segment(**changes):
    return lambda part: part["chunks"][0]["segments"][0].update(changes)


def _tensor(**changes):
    return lambda part: part["tensors"][0].update(changes)


@pytest.mark.parametrize(
    "damage",
    [
        _without_last_chunk,
        _chunk(image_offset=64),
        _chunk(size_bytes=0),
        _chunk(size_bytes=CHUNK_BYTES + 1),
        _segment(file=1),
        _segment(file=-1),
        _segment(file_offset=-1),
        _segment(file_offset=1 << 40),
        _segment(image_offset=-1),
        _segment(image_offset=1 << 40),
        _segment(size_bytes=0),
        _segment(size_bytes=1 << 40),
        _tensor(image_offset=-1),
        _tensor(size_bytes=1 << 40),
        _tensor(size_bytes=-1),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(damage):
    _, manifest = read(tiny_config())
    fields = json.loads(encode(manifest))
    damage(fields["parts"][1])
    with pytest.raises(BadCheckpoint, match="part 1"):
        decode(json.dumps(fields).encode())


def test_what_is_no_manifest_is_refused():
    for data in (b"", b"{}", b"\xff"):
        with pytest.raises(BadCheckpoint, match="not a manifest"):
            decode(data)
    _, manifest = read(tiny_config())
    with pytest.raises(BadCheckpoint, match="spec"):
        decode(encode(msgspec.structs.replace(manifest, parts=manifest.parts[:-1])))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 5))
def test_any_order_of_tensors_in_any_number_of_files_gives_the_same_images(random, shards):
    config = tiny_config()
    source, manifest = read(config)
    dealt = list(tiny_tensors(config).items())
    random.shuffle(dealt)
    shuffled = MemorySource(_deal(config, dealt, shards))
    other = read_checkpoint(shuffled).manifest
    assert other.spec == manifest.spec
    for part, reordered in zip(manifest.parts, other.parts, strict=True):
        data, moved = image(source, manifest, part), image(shuffled, other, reordered)
        there = {tensor.name: tensor for tensor in reordered.tensors}
        for tensor in part.tensors:
            at, to = tensor.image_offset, there[tensor.name].image_offset
            assert data[at : at + tensor.size_bytes] == moved[to : to + tensor.size_bytes]


def _deal(config, tensors, shards):
    files = {"config.json": json.dumps(config).encode()}
    weight_map = {}
    for number in range(shards):
        files[f"shard-{number}"] = encode_safetensors(tensors[number::shards])
        weight_map.update(
            dict.fromkeys((name for name, _ in tensors[number::shards]), f"shard-{number}")
        )
    return {**files, INDEX_FILE: json.dumps({"weight_map": weight_map}).encode()}
