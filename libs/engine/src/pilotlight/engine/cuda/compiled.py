"""Compiled kernels as bytes, and from such bytes: what triton's cache holds of them, by its own
keys (design 8: everything else that start-up computes).

::

    triton's cache    KEY / name.json, name.cubin, name.ptx, ...    a kernel
                      KEY / name.so                                 what launches kernels, in C
    an entry          KEY { name.json, name.cubin }, or KEY { name.so }

A key is a digest of all that a kernel is compiled from: its source, what it is compiled for, the
options, and triton itself. An entry of another triton is never looked up. An archive is executable
input: who reads one has checked where it comes from; here is checked that it holds together.
"""

import re
from collections.abc import Iterable

import msgspec

from pilotlight.native.graphs import check_image
from pilotlight.native.library import NativeError, NativeUnavailable

KEY = re.compile(r"[A-Z2-7]{52}")
"""A digest of 256 bits, in base 32."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
IMAGE, FACTS, LIBRARY = ".cubin", ".json", ".so"
LIST = "__grp__"
MAX_ENTRIES = 4096
ELF = b"\x7fELF"


class KernelsRefused(Exception):
    """Compiled kernels are not used; ``field`` says what is wrong with them."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What triton keeps under one key, as far as a process needs it that compiles nothing."""

    key: str
    files: dict[str, bytes]

    @property
    def facts(self) -> str:
        """The file that says what there is of a kernel; empty for a library."""
        return next((name for name in self.files if name.endswith(FACTS)), "")


def is_kept(name: str) -> bool:
    """Whether a file of triton's is one that another process needs: neither source, nor what stands
    between it and the image, nor the list of a kernel's files.
    """
    return name.endswith((IMAGE, FACTS, LIBRARY)) and not name.startswith(LIST)


def pack(entries: Iterable[Entry]) -> bytes:
    """Entries as an archive: the same bytes for the same entries."""
    ordered = sorted(entries, key=lambda entry: entry.key)
    return msgspec.msgpack.encode(
        [Entry(one.key, dict(sorted(one.files.items()))) for one in ordered]
    )


def unpack(data: bytes) -> tuple[Entry, ...]:
    """The entries of an archive.

    Raises:
        KernelsRefused: ``compile_cache``: it does not hold together.
    """
    try:
        entries = msgspec.msgpack.decode(data, type=tuple[Entry, ...])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise KernelsRefused("compile_cache", f"this is no archive of kernels: {error}") from error
    if not 0 < len(entries) <= MAX_ENTRIES:
        raise KernelsRefused("compile_cache", f"an archive has {len(entries)} kernels")
    if len({one.key for one in entries}) != len(entries):
        raise KernelsRefused("compile_cache", "an archive has a key twice")
    for entry in entries:
        if wrong := _wrong_with(entry):
            raise KernelsRefused("compile_cache", f"the entry {entry.key[:60]!r} {wrong}")
    return entries


def _wrong_with(entry: Entry) -> str:
    """What an entry is not as triton makes it; empty: nothing."""
    if not KEY.fullmatch(entry.key):
        return "has no key of triton's"
    if not all(NAME.fullmatch(name) for name in entry.files):
        return "has a file with such a name as triton gives none"
    by_end = {name[name.rfind(".") :]: data for name, data in entry.files.items()}
    if len(by_end) == len(entry.files) == 1 and LIBRARY in by_end:
        return "" if by_end[LIBRARY].startswith(ELF) else "has a library that is none"
    stems = {name[: name.rfind(".")] for name in entry.files}
    if by_end.keys() != {IMAGE, FACTS} or len(stems) != 1 or len(entry.files) != len(by_end):
        return "is neither a kernel nor a library"
    return _wrong_with_kernel(by_end[IMAGE], by_end[FACTS])


def _wrong_with_kernel(image: bytes, facts: bytes) -> str:
    try:
        msgspec.json.decode(facts, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return f"has facts that cannot be read: {error}"
    try:
        check_image(image)
    except NativeUnavailable:
        return "" if image.startswith(ELF) else "has an image that is none"
    except NativeError as error:
        return f"has an image that is none: {error}"
    return ""
