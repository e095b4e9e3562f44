"""Safetensors files that lie: made from a seed, parsed, and compared with what the safetensors
library makes of them.

Run as a program it does so under a limit on its memory: ``hostile_headers.py FIRST_SEED COUNT``;
what it found goes to standard output as JSON.
"""

import json
import random
import re
import resource
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import safetensors

from pilotlight.checkpoint.errors import CheckpointError
from pilotlight.checkpoint.reader import BufferedSource, Progress, SourceFile, unobserved
from pilotlight.checkpoint.safetensors import StoredTensor, read_header

SLACK_BYTES = 32 * 1024 * 1024
"""What the program may take beyond what it has after its imports. The largest file has a thousandth
of it."""

STRICTER = {
    "appears twice": "which of two values counts depends on the reader",
    "and nothing else": "a key that the format does not have is perhaps one that another reader obeys",
    "is not described by an object": "a list in the place of an object, whose items the library takes for the fields",
    "unknown element type": "an element type that the library knows and no engine here runs",
    "impossible shape": "more dimensions, or larger ones, than any tensor has",
    "no value ends within": "names and entries have a length beyond which no true one goes",
}
"""What the library takes and we refuse, by what our refusal says; and why."""

TOKENS = (
    b"0", b"-1", b"-0", b"1e3", b"2.0", b"1E400", b"9223372036854775807", b"9223372036854775808", b"18446744073709551616",
    b"9" * 400, b"9" * 5000, b"null", b"true", b"NaN", b"Infinity", b"-Infinity", b"[]", b"{}", b"[[]]", b'""', b'"F32"',
    b'"\\ud800"', b'"\\udc00\\ud800"', b'"\\ud83d\\ude00"', b'"\\u0000"', b'"\x01"', b'"\xff"', b'"\xed\xa0\x80"', b'"\xc3\xa9"',
    b"[" * 60 + b"]" * 60, b"[" * 3000, b'{"a":' * 700, b",", b":", b'"', b"\\", b"}", b"{", b"/**/", b"\xef\xbb\xbf", b"\0",
    b'"__metadata__":', b'"__metadata__":{"a":"b"},', b'"dtype":"F32",', b'"shape":[2],', b'"data_offsets":[0,8],',
)  # fmt: skip
DTYPES = (
    "F32",
    "BF16",
    "F16",
    "U8",
    "I64",
    "BOOL",
    "F8_E4M3",
    "F64",
    "C64",
    "F4",
    "F6_E2M3",
    "F8_E8M0",
    "f32",
    "",
)
SIZES = {
    "F32": 4,
    "BF16": 2,
    "F16": 2,
    "U8": 1,
    "I64": 8,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F64": 8,
    "C64": 8,
    "F8_E8M0": 1,
}
NUMBERS = (
    0,
    1,
    2,
    7,
    -1,
    255,
    1 << 31,
    (1 << 32) - 1,
    1 << 40,
    1 << 48,
    1 << 62,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
    1 << 64,
    10**30,
)
LARGE = (1, 2, 1 << 20, 1 << 31, 1 << 40)
"""Each is a size that a dimension may have."""
VALUE = rb"\"[A-Za-z0-9_]+\"|\[[^\]]*\]|\{\}"
NAMES = (
    "a",
    "b",
    "model.layers.0.self_attn.q_proj.weight",
    "é",
    "",
    "\u0000",
    "x" * 300,
    "x" * 1100,
    "__metadata__",
    "\ud800",
)


class CheckedSource(BufferedSource):
    """One file, of which nothing is read that it does not have."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.file = SourceFile(name="f", size_bytes=len(data), version="")

    def list_files(self) -> tuple[SourceFile, ...]:
        return (self.file,)

    def read_into(
        self,
        file: SourceFile,
        offset: int,
        buffers: Sequence[memoryview],
        progress: Progress = unobserved,
    ) -> None:
        for buffer in buffers:
            assert offset + len(buffer) <= len(self.data), "a read beyond the file"
            buffer[:] = self.data[offset : offset + len(buffer)]
            offset += len(buffer)


def sound(rng: random.Random) -> tuple[dict[str, object], bytes]:
    """A header that is true, and its data."""
    header: dict[str, object] = {}
    if rng.random() < 0.5:
        header["__metadata__"] = {
            "format": "pt",
            **({"note": "é\ud83d\ude00"[: rng.randrange(4)]} if rng.random() < 0.2 else {}),
        }
    end = 0
    for name in rng.sample(NAMES[:6], rng.randrange(5)):
        dtype = rng.choice(tuple(SIZES))
        shape = [rng.randrange(4) for _ in range(rng.randrange(4))]
        size = SIZES[dtype]
        for dimension in shape:
            size *= dimension
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    return header, rng.randbytes(end)


def framed(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def written(header: object, rng: random.Random) -> bytes:
    separators = rng.choice(((",", ":"), (", ", ": ")))
    return json.dumps(
        header,
        separators=separators,
        ensure_ascii=rng.random() < 0.9,
        indent=rng.choice((None,) * 9 + (1,)),
    ).encode(errors="surrogatepass")


def _lying_values(rng: random.Random) -> bytes:
    """Values of the right kind, with the wrong content."""
    header, data = sound(rng)
    for _ in range(rng.choice((1, 1, 2, 3))):
        name = rng.choice((*header, *header, *NAMES))
        entry = header.setdefault(name, {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]})
        if not isinstance(entry, dict):
            continue
        match rng.randrange(7):
            case 0:
                entry["dtype"] = rng.choice(DTYPES)
            case 1:
                numbers = rng.choice((NUMBERS, LARGE))
                entry["shape"] = [rng.choice(numbers) for _ in range(rng.randrange(10))]
                if rng.random() < 0.5:
                    # Nothing but an empty tensor has a shape of any size that its offsets do not
                    # give away.
                    entry["shape"].insert(rng.randrange(4), 0)
                    entry["data_offsets"] = [len(data)] * 2
            case 2:
                entry["data_offsets"] = [
                    rng.choice(NUMBERS) for _ in range(rng.choice((2, 2, 2, 0, 1, 3)))
                ]
            case 3:
                entry["data_offsets"] = sorted(rng.randrange(len(data) + 9) for _ in range(2))
            case 4:
                entry.pop(rng.choice(tuple(entry)), None) if entry else None
            case 5:
                entry[rng.choice(("extra", "dtype", "shape", "data_offsets"))] = rng.choice(
                    (None, True, 1.5, "x", [], {}, [None], {"a": "b"})
                )
            case _:
                header[name] = rng.choice(
                    (None, [], "x", 1, ["F32", [2], [0, 8]], {}, {"a": 1}, {"a": "b"}, [[], []])
                )
    return framed(written(header, rng), data + bytes(rng.choice((0, 0, 0, 1, 8))))


def _lying_length(rng: random.Random) -> bytes:
    """The header's length, and the file's."""
    header, data = sound(rng)
    raw = framed(written(header, rng), data)
    length = rng.choice(
        (
            0,
            1,
            7,
            len(raw),
            len(raw) - 8,
            len(raw) - 9,
            1 << 20,
            1 << 27,
            1 << 62,
            (1 << 64) - 1,
            rng.randrange(256),
        )
    )
    raw = length.to_bytes(8, "little") + raw[8:] if rng.random() < 0.6 else raw
    return (
        raw[: rng.randrange(len(raw) + 1)] if rng.random() < 0.6 else raw + bytes(rng.randrange(64))
    )


def _flipped(rng: random.Random) -> bytes:
    """Single bytes."""
    header, data = sound(rng)
    text = bytearray(written(header, rng))
    for _ in range(rng.randrange(1, 4)):
        text[rng.randrange(len(text))] = rng.choice(
            (rng.randrange(256), rng.choice(b'{}[]",:\\-.0123456789eEaF \n\t\0\xff'))
        )
    return framed(bytes(text), data)


def _spliced(rng: random.Random) -> bytes:
    """Pieces of JSON, put in, taken out or doubled anywhere."""
    header, data = sound(rng)
    text = written(header, rng)
    for _ in range(rng.randrange(1, 3)):
        start = rng.randrange(len(text) + 1)
        stop = min(len(text), start + rng.choice((0, 0, 1, 2, 5, 20)))
        match rng.randrange(3):
            case 0:
                text = text[:start] + rng.choice(TOKENS) + text[stop:]
            case 1:
                text = text[:stop] + text[start:stop] + text[stop:]
            case _:
                text = text[:start] + text[stop:]
    return framed(text, data)


def _at_a_value(rng: random.Random) -> bytes:
    """A token where a value stands."""
    header, data = sound(rng)
    text = written(header, rng)
    places = [found.span() for found in re.finditer(rng.choice((rb"[0-9]+", VALUE)), text)]
    if places:
        start, stop = rng.choice(places)
        text = text[:start] + rng.choice(TOKENS) + text[stop:]
    return framed(text, data)


def _twice(rng: random.Random) -> bytes:
    """Keys that repeat, with the same value or another one."""
    header, data = sound(rng)
    members = [json.dumps(name) + ":" + json.dumps(value) for name, value in header.items()]
    members += rng.choices(members, k=rng.randrange(1, 3)) if members else []
    rng.shuffle(members)
    text = "{" + ",".join(members) + "}"
    if rng.random() < 0.4:
        text = re.sub(r'("shape":\s*\[[^\]]*\])', r"\1,\1", text, count=1)
    return framed(text.encode(), data)


def _metadata(rng: random.Random) -> bytes:
    """Metadata of every kind."""
    header, data = sound(rng)
    header.pop("__metadata__", None)
    text = written(header, rng).strip()
    value = rng.choice((
        *TOKENS, b'{"a":1}', b'{"a":null}', b'{"a":"b","a":"c"}', b'{"a":{"b":"c"}}', b'{"a":"' + b"y" * 3000 + b'"}', b'{"\\ud800":"x"}',
        b'{"x":"\\udfff"}', b'{"x":"\xc3"}', b'{"dtype":"F32","shape":[2],"data_offsets":[0,8]}', b'{"format":"pt"}',
    ))  # fmt: skip
    comma = b"," if len(text) > 2 else b""
    return framed(b'{"__metadata__":' + value + comma + text[1:], data)


def _junk(rng: random.Random) -> bytes:
    """Nothing that was ever a header."""
    match rng.randrange(4):
        case 0:
            return rng.randbytes(rng.randrange(64))
        case 1:
            return framed(b"{" + rng.randbytes(rng.randrange(64)), b"")
        case 2:
            return framed(b"".join(rng.choices(TOKENS, k=rng.randrange(8))), b"")
        case _:
            return framed(
                b"{" + b"".join(rng.choices(TOKENS, k=rng.randrange(8))) + b"}" * rng.randrange(2),
                b"",
            )


def _true(rng: random.Random) -> bytes:
    """Nothing is wrong: a parser that refuses everything would be found out."""
    header, data = sound(rng)
    return framed(written(header, rng) + b" " * rng.randrange(8), data)


KINDS: dict[str, Callable[[random.Random], bytes]] = {
    "values": _lying_values,
    "lengths": _lying_length,
    "flips": _flipped,
    "splices": _spliced,
    "tokens": _at_a_value,
    "twice": _twice,
    "metadata": _metadata,
    "junk": _junk,
    "true": _true,
}


def hostile(seed: int) -> tuple[str, bytes]:
    """A file, the same for the same seed, and of which kind it is."""
    rng = random.Random(seed)
    kind = tuple(KINDS)[seed % len(KINDS)]
    return kind, KINDS[kind](rng)


def parsed(data: bytes) -> tuple[StoredTensor, ...] | CheckpointError:
    """What we make of a file. Anything but a parse or a typed error ends the run."""
    source = CheckedSource(data)
    try:
        return read_header(source, source.file)
    except CheckpointError as error:
        return error


def judge(data: bytes) -> str:
    """``right``, ``refused``, or ``stricter: WHY``.

    Raises:
        AssertionError: we accept what the library refuses, read something else in it than the
            library, or refuse without a reason.
    """
    ours = parsed(data)
    try:
        library = dict(safetensors.deserialize(data))
    except safetensors.SafetensorError:
        library = None
    if isinstance(ours, CheckpointError):
        if library is None:
            return "refused"
        reasons = [why for why in STRICTER if why in str(ours)]
        assert reasons, f"refused without a reason that is listed: {ours}"
        return f"stricter: {reasons[0]}"
    assert library is not None, "accepted what the library refuses"
    told = {
        tensor.name: (tensor.dtype, list(tensor.shape), data[tensor.offset :][: tensor.size_bytes])
        for tensor in ours
    }
    assert len(told) == len(ours), "a name twice"
    assert told == {
        name: (found["dtype"], found["shape"], bytes(found["data"]))
        for name, found in library.items()
    }, "read otherwise"
    return "right"


def main(first_seed: int, count: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + SLACK_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    tally: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + count):
        kind, data = hostile(seed)
        try:
            verdict = judge(data)
        except BaseException:
            print(f"seed {seed}, {kind}: {data[:2000]!r}", file=sys.stderr)
            raise
        tally[verdict] += 1
        tally[f"{kind} {verdict.split(':')[0]}"] += 1
    print(json.dumps(tally))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
