"""Headers: what is accepted, and that nothing but a CheckpointError comes out of a lying one."""

import json

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from pilotlight.checkpoint import safetensors as under_test
from pilotlight.checkpoint.errors import BadCheckpoint, UnsupportedModel
from pilotlight.checkpoint.reader import MemorySource
from pilotlight.checkpoint.safetensors import INDEX_FILE, SINGLE_FILE, read_tensors
from pilotlight.checkpoint.testing import encode_safetensors, frame_header

PAIR = [("a", (2, 3)), ("b", (4,))]


def read(files: dict[str, bytes]):
    source = MemorySource(files)
    return read_tensors(source, {file.name: file for file in source.list_files()})


def read_one(data: bytes):
    return read({SINGLE_FILE: data})


def file_of(header: object, data: bytes = b"") -> bytes:
    return frame_header(json.dumps(header).encode()) + data


def tensor(dtype="F32", shape=(2,), offsets=(0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_tensors_lie_where_the_header_says():
    data = encode_safetensors(PAIR)
    found = read_one(data)
    assert [(t.name, t.dtype, t.shape, t.size_bytes) for t in found.values()] == [
        ("a", "BF16", (2, 3), 12),
        ("b", "BF16", (4,), 8),
    ]
    assert found["b"].offset == found["a"].offset + 12
    assert found["b"].offset + 8 == len(data)


def test_files_of_the_safetensors_library_are_read(tmp_path):
    arrays = {
        "x": np.arange(6, dtype=np.float32).reshape(2, 3),
        "y": np.arange(5, dtype=np.float16),
        "scalar": np.array(1.5),
        "empty": np.zeros((0, 4), np.int64),
    }
    data = safetensors.numpy.save(arrays, metadata={"format": "np"})
    found = read_one(data)
    for name, array in arrays.items():
        place = found[name]
        assert place.shape == array.shape
        assert data[place.offset : place.offset + place.size_bytes] == array.tobytes()


def test_the_safetensors_library_reads_the_files_of_the_test_helper():
    loaded = dict(safetensors.deserialize(encode_safetensors(PAIR)))
    assert loaded["a"]["shape"] == [2, 3]


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "too few"),
        (b"\x01\0\0\0", "too few"),
        ((1 << 62).to_bytes(8, "little") + b"{}", "claims"),
        ((3).to_bytes(8, "little") + b"{}", "claims"),
        (file_of([]), "brace"),
        (frame_header(b' {"a":1}'), "brace"),
        (frame_header(b"{"), "not valid JSON"),
        (frame_header(b'{"\xff":1}'), "not valid JSON"),
        (frame_header(b'{"a":' * 5000 + b"1" + b"}" * 5000), "no value ends within"),
        (frame_header(b'{"a":' + b"[" * 2000 + b"]" * 2000), "nested too deeply"),
        (frame_header(b'{"' + b"a" * 1024 + b'":1}'), "no value ends within"),
        (frame_header(b"{}x"), "behind the object"),
        (frame_header(b'{"a":{},}'), "needs a dtype"),
        (frame_header(b'{"__metadata__":{},}'), "a string is missing"),
        (frame_header(b'{"__metadata__":{"\xff":""}}'), "not valid JSON"),
        (frame_header(b'{"a":NaN}'), "NaN"),
        (frame_header(b'{"a":' + b"9" * 5000 + b"}"), "no value ends within"),
        (
            frame_header(b'{"a":%b,"a":%b}' % ((json.dumps(tensor()).encode(),) * 2)) + b"8" * 8,
            "'a' appears twice",
        ),
        (frame_header(b'{"a":{"dtype":"F32","dtype":"F16"}}'), "'dtype' appears twice"),
        (file_of({"a": 1}), "not described by an object"),
        (file_of({"a": {}}), "needs a dtype"),
        (file_of({"a": {**tensor(), "extra": 1}}, b"8" * 8), "nothing else"),
        (file_of({"a": tensor(shape=(-2,))}, b"8" * 8), "needs a dtype"),
        (frame_header(b'{"a":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}'), "needs a dtype"),
        (file_of({"a": tensor(shape=(1 << 40, 1 << 40, 0), offsets=(0, 0))}), "impossible shape"),
        (file_of({"a": tensor(shape=(2.0,))}, b"8" * 8), "needs a dtype"),
        (file_of({"a": tensor(shape=(True, 2))}, b"8" * 8), "needs a dtype"),
        (file_of({"a": tensor(shape=(1 << 49, 0), offsets=(0, 0))}), "impossible shape"),
        (file_of({"a": tensor(shape=(1,) * 9, offsets=(0, 4))}, b"4444"), "impossible shape"),
        (file_of({"a": tensor(offsets=(0, 4))}, b"4444"), "takes 8 bytes"),
        (file_of({"a": tensor(offsets=(8, 0))}, b"8" * 8), "takes 8 bytes"),
        (file_of({"a": tensor(offsets=(0, 1 << 70))}, b"8" * 8), "needs a dtype"),
        (file_of({"a": tensor()}, b"1234"), "truncated"),
        (file_of({"a": tensor()}, b"8" * 9), "1 bytes at the end"),
        (file_of({"a": tensor(offsets=(4, 12))}, b"8" * 12), "4 bytes before a"),
        (file_of({"a": tensor(), "b": tensor(offsets=(4, 12))}, b"8" * 12), "overlaps"),
        (file_of({"a": tensor(), "b": tensor()}, b"8" * 8), "overlaps"),
        (file_of({"__metadata__": []}), "__metadata__"),
        (file_of({"__metadata__": {"a": 1}}), "__metadata__"),
    ],
)
def test_a_lying_header_is_named(data, fault):
    with pytest.raises(BadCheckpoint, match=fault) as caught:
        read_one(data)
    assert caught.value.file == SINGLE_FILE
    assert str(caught.value).startswith(SINGLE_FILE)


def test_an_enormous_header_is_not_read(monkeypatch):
    monkeypatch.setattr(under_test, "MAX_HEADER_BYTES", 64)
    with pytest.raises(BadCheckpoint, match="at most 64"):
        read_one(encode_safetensors(PAIR))


def test_unknown_element_types_are_unsupported():
    with pytest.raises(UnsupportedModel, match="F4"):
        read_one(file_of({"a": tensor(dtype="F4", shape=(16,))}, b"8" * 8))


def test_pickled_weights_alone_are_unsupported():
    with pytest.raises(UnsupportedModel, match="convert them to safetensors"):
        read({"pytorch_model.bin": b""})
    with pytest.raises(BadCheckpoint, match="neither"):
        read({"README.md": b""})


class TestShards:
    def files(self, weight_map: object) -> dict[str, bytes]:
        return {
            "one": encode_safetensors([("a", (2,))]),
            "two": encode_safetensors([("b", (2,))]),
            INDEX_FILE: json.dumps({"weight_map": weight_map}).encode(),
        }

    def test_all_shards_are_read(self):
        found = read(self.files({"a": "one", "b": "two"}))
        assert {name: place.file for name, place in found.items()} == {"a": "one", "b": "two"}

    @pytest.mark.parametrize(
        ("weight_map", "fault"),
        [
            (None, "no weight_map"),
            ([], "not an object"),
            ({"a": 3}, "not a string"),
            ({"a": "one", "b": "three"}, "shards that are missing: three"),
            ({"a": "../one"}, "shards that are missing"),
            ({"a": "one", "b": "one"}, "says that b is in one"),
            ({"a": "one", "c": "two"}, "says that c is in two"),
        ],
    )
    def test_an_index_that_lies_is_named(self, weight_map, fault):
        with pytest.raises(BadCheckpoint, match=fault) as caught:
            read(self.files(weight_map))
        assert caught.value.file == INDEX_FILE

    def test_a_tensor_in_two_shards_is_refused(self):
        files = self.files({"a": "one", "b": "two"})
        files["two"] = encode_safetensors([("a", (2,)), ("b", (2,))])
        with pytest.raises(BadCheckpoint, match="a is also in one"):
            read(files)


def test_a_name_with_half_of_a_character_is_refused():
    """JSON can write it, UTF-8 cannot: it would surface only when the manifest is stored."""
    with pytest.raises(BadCheckpoint, match="half of a character"):
        read_one(file_of({"\ud800": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}, b""))
