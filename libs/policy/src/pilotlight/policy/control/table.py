"""A mapping that shares what did not change with the one that it was made from."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

Key = TypeVar("Key", bound=str)
Value = TypeVar("Value")

CHUNKS = 64


class Table(Mapping[Key, Value]):
    """Immutable.

    A change copies the chunks of the keys that it touches, not the whole. In no order.
    """

    __slots__ = ("_chunks", "_length")

    def __init__(self, chunks: tuple[dict[Key, Value], ...] = (), length: int = 0) -> None:
        self._chunks = chunks or tuple({} for _ in range(CHUNKS))
        self._length = length

    def put(self, news: Mapping[Key, Value], gone: Iterable[Key] = ()) -> "Table[Key, Value]":
        """With other values for some keys, and without others."""
        chunks, copied, length = list(self._chunks), set[int](), self._length
        for key, value in news.items():
            chunk = _own(chunks, copied, key)
            length += key not in chunk
            chunk[key] = value
        for key in gone:
            if key in self:
                del _own(chunks, copied, key)[key]
                length -= 1
        return Table(tuple(chunks), length) if copied else self

    def told(self, news: "Mapping[Key, Value | None]") -> "Table[Key, Value]":
        """With what is known of some now; None: nothing any more."""
        return self.put(
            {key: one for key, one in news.items() if one is not None},
            [key for key, one in news.items() if one is None],
        )

    def __getitem__(self, key: Key) -> Value:
        return self._chunks[hash(key) % CHUNKS][key]

    def find(self, key: Key) -> Value | None:
        """The value of a key; None where there is none."""
        return self._chunks[hash(key) % CHUNKS].get(key)

    def among(self, keys: Iterable[Key]) -> set[Key]:
        """Those of many keys that are here."""
        chunks = self._chunks
        if isinstance(keys, frozenset):
            return set[Key]().union(*map(keys.intersection, chunks))
        return {key for key in keys if key in chunks[hash(key) % CHUNKS]}

    def __contains__(self, key: object) -> bool:
        return key in self._chunks[hash(key) % CHUNKS]

    def __iter__(self) -> Iterator[Key]:
        for chunk in self._chunks:
            yield from chunk

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"Table({dict(self)})"


def _own(chunks: list[dict[Key, Value]], copied: set[int], key: Key) -> dict[Key, Value]:
    """The chunk of a key, copied before it is written to."""
    at = hash(key) % CHUNKS
    if at not in copied:
        chunks[at] = dict(chunks[at])
        copied.add(at)
    return chunks[at]
