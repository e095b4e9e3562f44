"""Bodies that are almost requests: valid ones of every route, changed at random. One seed gives the
same bodies on every machine.
"""

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

LENGTHS = (
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "num_predict",
    "options",
    "n",
)
"""How long an answer may be: these stay, so that what is valid after all ends soon."""
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308, "", " ", "0", "true",
    "\x00", "\ud800", "é" * 40, "x" * 5000, "../../etc", [], [[]], [None], {}, {"": {}}, {"a": [{}]},
)  # fmt: skip
NAMES = ("stream", "stop", "seed", "tools", "tool_choice", "logprobs", "echo", "suffix", "\x00", "")
DEPTHS = (10, 200, 5_000)
TEXTS = ("What is a pilot light?", "ü" * 30, "x", "<|im_start|>", "\n\n")


@dataclass(frozen=True, slots=True)
class Fuzzed:
    """One request."""

    path: str
    body: bytes


def valid_of(model: str) -> dict[str, dict[str, Any]]:
    """A body for each route of the API for inference that takes one."""
    turns = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
        {"role": "assistant", "content": "So."},
        {"role": "user", "content": "And?"},
    ]
    return {
        "/v1/chat/completions": {
            "model": model, "messages": turns, "max_tokens": 1, "n": 1, "temperature": 0.5, "top_p": 0.9,
            "stop": ["."], "seed": 1, "logprobs": True, "top_logprobs": 1, "logit_bias": {"5": 1.5},
            "stream": False, "user": "u",
        },
        "/v1/completions": {
            "model": model, "prompt": "Why?", "max_tokens": 1, "n": 1, "echo": True, "logprobs": 1,
            "presence_penalty": 0.1, "stream": True, "stream_options": {"include_usage": True},
        },
        "/v1/responses": {
            "model": model, "input": [{"role": "user", "content": "Why?"}], "max_output_tokens": 1,
            "instructions": "Be short.", "store": False, "text": {"format": {"type": "text"}},
            "metadata": {"a": "b"},
        },
        "/v1/messages": {
            "model": model, "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 1,
            "system": [{"type": "text", "text": "Be short."}], "stop_sequences": ["."], "top_k": 5,
        },
        "/v1/messages/count_tokens": {
            "model": model, "messages": [{"role": "user", "content": "Why?"}],
        },
        "/v1/embeddings": {"model": model, "input": ["a", "b"], "encoding_format": "float"},
        "/v1/rerank": {"model": model, "query": "a", "documents": ["b", {"text": "c"}], "top_n": 1},
        "/v1/score": {"model": model, "text_1": "a", "text_2": ["b", "c"]},
        "/tokenize": {"model": model, "prompt": "Why?", "return_token_strs": True},
        "/detokenize": {"model": model, "tokens": [5, 6, 7]},
        "/api/chat": {
            "model": model, "messages": [{"role": "user", "content": "Why?"}], "stream": False,
            "options": {"num_predict": 1, "temperature": 0.5, "stop": ["."]},
        },
        "/api/generate": {
            "model": model, "prompt": "Why?", "system": "Be short.", "options": {"num_predict": 1},
        },
        "/api/embed": {"model": model, "input": ["a"], "truncate": True},
        "/api/embeddings": {"model": model, "prompt": "a"},
        "/api/show": {"model": model},
        "/api/pull": {"model": model, "stream": True},
        "/v1/batches": {
            "input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h",
        },
    }  # fmt: skip


def fuzzed(model: str, seed: int, count: int) -> Iterator[Fuzzed]:
    """As many bodies, for all routes in turn."""
    drawn = random.Random(seed)
    valid = list(valid_of(model).items())
    for number in range(count):
        path, body = valid[number % len(valid)]
        yield Fuzzed(path, _changed(copy.deepcopy(body), drawn))


def _changed(body: dict[str, Any], drawn: random.Random) -> bytes:
    for _ in range(drawn.choice((0, 1, 1, 1, 2, 4))):
        drawn.choice(_CHANGES)(body, drawn)
    written = json.dumps(body, ensure_ascii=drawn.random() < 0.5).encode(errors="surrogatepass")
    return drawn.choice(_BYTES)(written, drawn) if drawn.random() < 0.4 else written


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container with a key or an index of it, but those of lengths."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        if key in LENGTHS:
            continue
        yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)


def _replace(body: dict[str, Any], drawn: random.Random) -> None:
    holder, key = drawn.choice(list(_places(body)))
    holder[key] = copy.deepcopy(drawn.choice(ODD))


def _drop(body: dict[str, Any], drawn: random.Random) -> None:
    holder, key = drawn.choice(list(_places(body)))
    del holder[key]
    if not list(_places(body)):
        body["model"] = None


def _add(body: dict[str, Any], drawn: random.Random) -> None:
    body[drawn.choice(NAMES)] = copy.deepcopy(drawn.choice(ODD))


def _nest(body: dict[str, Any], drawn: random.Random) -> None:
    deep: Any = 1
    # As far as Python's own writer goes; deeper ones are made of bytes.
    for _ in range(drawn.choice((5, 60, 300))):
        deep = [deep] if drawn.random() < 0.5 else {"a": deep}
    holder, key = drawn.choice(list(_places(body)))
    holder[key] = deep


def _say(body: dict[str, Any], drawn: random.Random) -> None:
    holder, key = drawn.choice(list(_places(body)))
    holder[key] = drawn.choice(TEXTS)


def _cut(written: bytes, drawn: random.Random) -> bytes:
    return written[: drawn.randrange(len(written))]


def _flip(written: bytes, drawn: random.Random) -> bytes:
    changed = bytearray(written)
    for _ in range(drawn.randint(1, 4)):
        changed[drawn.randrange(len(changed))] = drawn.randrange(256)
    return bytes(changed)


def _insert(written: bytes, drawn: random.Random) -> bytes:
    at = drawn.randrange(len(written) + 1)
    odd = drawn.choice(
        (b"\xff", b"\xc0\x80", b"\x00", b"\xed\xa0\x80", b"\\ud800", b"\xef\xbb\xbf", b",")
    )
    return written[:at] + odd + written[at:]


def _double(written: bytes, _: random.Random) -> bytes:
    return b'{"model":"x",' + written[1:]


def _deep(_: bytes, drawn: random.Random) -> bytes:
    depth = drawn.choice(DEPTHS)
    return b'{"model":' + b"[" * depth + b"]" * depth + b"}"


def _noise(_: bytes, drawn: random.Random) -> bytes:
    return drawn.randbytes(drawn.randrange(200))


Change = Callable[[dict[str, Any], random.Random], None]
_CHANGES: tuple[Change, ...] = (_replace, _replace, _replace, _drop, _add, _nest, _say)
_BYTES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _cut, _flip, _flip, _insert, _insert, _double, _deep, _noise,
)  # fmt: skip
