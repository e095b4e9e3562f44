"""The compiled library: where it is found, and its functions with their types."""

import ctypes
import os
from collections.abc import Callable
from ctypes import (
    POINTER,
    c_char_p,
    c_double,
    c_int,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from functools import cache
from pathlib import Path

from pilotlight.native.building import CannotCompile, compile_library, library_name

OUT_OF_MEMORY, MISUSED, TAKEN, NO_DRIVER, OUT_OF_ROOM = 2, -1, -2, -3, -4
TIMED_OUT, NOWHERE = -5, -6
"""What functions return: the driver's code, or one of the library's own."""
_U64 = POINTER(c_uint64)
_FUNCTIONS: dict[str, tuple[object, tuple[object, ...]]] = {
    "error": (c_char_p, ()),
    "driver_open": (c_int, (c_char_p,)),
    "device_open": (c_int, (c_int, POINTER(c_void_p))),
    "device_memory": (c_int, (c_void_p, _U64, _U64)),
    "arena_open": (c_int, (c_void_p, c_int, c_uint64, c_uint64, POINTER(c_void_p))),
    "arena_close": (None, (c_void_p, c_int)),
    "arena_address": (c_uint64, (c_void_p,)),
    "arena_granule": (c_uint64, (c_void_p,)),
    "arena_physical_bytes": (c_uint64, (c_void_p,)),
    "arena_idle_bytes": (c_uint64, (c_void_p,)),
    "arena_counts": (None, (c_void_p, c_void_p)),
    "arena_back": (c_int, (c_void_p, c_void_p, c_uint64, c_uint64)),
    "arena_unback": (c_int, (c_void_p, c_void_p, c_uint64)),
    "arena_keep": (None, (c_void_p, c_uint64)),
    "arena_settle": (c_int, (c_void_p, c_uint64)),
    "arena_next": (None, (c_void_p, c_uint64, _U64, _U64)),
    "arena_share": (c_int, (c_void_p, c_uint64, c_uint64, c_uint64)),
    "arena_export": (c_int, (c_void_p, c_uint64, POINTER(c_int), _U64, _U64)),
    "arena_import": (c_int, (c_void_p, c_uint64, c_uint64, c_int)),
    "pool_open": (c_int, (c_void_p, c_uint64, c_uint64, c_uint64, c_int, POINTER(c_int))),
    "pool_close": (c_int, (c_int,)),
    "pool_select": (c_int, (c_int,)),
    "pool_state": (c_int, (c_int, _U64, _U64, _U64)),
    "pool_events": (c_int, (c_int, _U64, c_uint64, _U64)),
    "pool_take": (c_int, (c_int, c_uint64, _U64)),
    "pool_malloc": (c_void_p, (ctypes.c_ssize_t, c_int, c_void_p)),
    "pool_free": (None, (c_void_p, ctypes.c_ssize_t, c_int, c_void_p)),
    "copier_open": (c_int, (c_void_p, c_uint64, c_int, c_int, c_int, POINTER(c_void_p))),
    "copier_close": (None, (c_void_p,)),
    "copier_pin": (c_int, (c_void_p, c_uint64, c_uint64)),
    "copier_unpin": (c_int, (c_void_p, c_uint64)),
    "copier_submit": (c_uint64, (c_void_p, _U64, c_int, c_int)),
    "copier_wait": (c_int, (c_void_p, c_uint64, c_double)),
    "copier_is_over": (c_int, (c_void_p, c_uint64)),
    "copier_order_before": (c_int, (c_void_p, c_uint64, c_void_p, c_double)),
    "copier_counts": (None, (c_void_p, _U64, _U64, _U64, _U64)),
    "images_record": (c_int, (c_char_p,)),
    "images_add": (c_int, (c_char_p, c_uint64, c_uint64)),
    "images_count": (c_int, (_U64,)),
    "image_check": (c_int, (c_char_p, c_uint64)),
    "image_prune": (c_int, (c_char_p, c_uint64, c_char_p, c_uint64, c_char_p, c_uint64, _U64)),
    "graphs_dump": (
        c_int,
        (
            _U64,
            _U64,
            c_int,
            c_uint64,
            c_uint64,
            c_int,
            c_char_p,
            c_uint64,
            POINTER(c_void_p),
            _U64,
            _U64,
        ),
    ),
    "graphs_kernels": (c_int, (_U64, c_int, POINTER(c_void_p))),
    "graphs_check_node": (c_int, (c_int, c_char_p)),
    "free": (None, (c_void_p,)),
    "archive_check": (c_int, (c_char_p, c_uint64)),
    "archive_open": (c_int, (c_void_p, c_char_p, c_uint64, c_uint64, POINTER(c_void_p), _U64)),
    "archive_tag": (c_uint64, (c_void_p, c_uint32)),
    "archive_kernel": (c_char_p, (c_void_p, c_uint32)),
    "archive_offer": (c_int, (c_void_p, c_uint32, c_void_p)),
    "archive_build": (c_int, (c_void_p, c_uint32, c_void_p)),
    "archive_advance": (c_int, (c_void_p, c_uint32, c_void_p, _U64)),
    "archive_launch": (c_int, (c_void_p, c_uint32, c_void_p)),
    "archive_load": (c_int, (c_void_p, c_uint32)),
    "archive_check_list": (c_int, (c_void_p, c_uint32)),
    "archive_launch_list": (c_int, (c_void_p, c_uint32, c_void_p)),
    "archive_spent": (None, (c_void_p, _U64)),
    "archive_check_addresses": (
        c_int,
        (c_void_p, c_uint32, c_uint32, _U64, c_uint64, c_uint64, c_uint64, _U64),
    ),
    "archive_walk": (c_int, (c_void_p, c_uint32, c_void_p)),
    "archive_prove": (c_int, (c_void_p, c_char_p, c_uint64, POINTER(c_void_p))),
    "archive_close": (None, (c_void_p,)),
    "pointers_check": (c_int, (c_char_p, c_uint64)),
    "pointers_move": (
        c_int,
        (c_char_p, c_uint64, _U64, c_uint32, c_uint64, c_uint64, c_char_p),
    ),
    "start_wait": (c_int, (c_void_p, c_int, c_double)),
    "start_take_arena": (c_int, (c_void_p, POINTER(c_void_p), _U64, c_double)),
    "start_take_archive": (
        c_int,
        (c_void_p, c_char_p, c_uint64, POINTER(c_void_p), _U64, _U64),
    ),
    "start_times": (None, (c_void_p, _U64)),
    "start_end": (None, (c_void_p,)),
    "await_words": (c_int, (c_void_p, c_uint64, c_int, c_double)),
    "read_open": (
        c_int,
        (
            c_uint64,
            c_int,
            c_uint64,
            c_uint64,
            c_uint64,
            c_uint64,
            c_void_p,
            c_int,
            c_void_p,
            POINTER(c_void_p),
        ),
    ),
    "read_run": (c_int, (c_void_p, c_int, c_void_p, POINTER(c_int), POINTER(c_int))),
    "read_cancel": (None, (c_void_p,)),
    "read_close": (None, (c_void_p,)),
    "populate": (c_int, (c_uint64, c_uint64)),
    "blake3": (None, (c_char_p, c_uint64, c_char_p)),
    "blake3_chunks": (c_int, (c_char_p, c_void_p, c_char_p)),
    "dlpack": (c_void_p, (c_uint64, c_int, c_int, c_int, c_int, c_int, POINTER(c_int64))),
}

_BRIEF = frozenset({"read_open", "read_close"})
"""Functions so short that to give Python's lock away for them, and wait for it again, takes
longer."""


class NativeUnavailable(Exception):
    """The library is not here and cannot be made; the message says why."""


class NativeError(Exception):
    """A function of the library, or the driver below it, refused."""

    def __init__(self, code: int, message: str) -> None:
        self.code = code
        super().__init__(message)


class OutOfMemory(NativeError):
    """The device has no such memory."""


class AddressTaken(NativeError):
    """Something else is where the addresses were asked for."""


class NoDriver(NativeError):
    """There is no usable driver of NVIDIA's here."""


class TooSlow(NativeError):
    """It did not come to an end in time."""


class Nowhere(NativeError):
    """An address lies where nothing is known to be."""


_ERRORS: dict[int, type[NativeError]] = {
    OUT_OF_MEMORY: OutOfMemory,
    TAKEN: AddressTaken,
    NO_DRIVER: NoDriver,
    TIMED_OUT: TooSlow,
    NOWHERE: Nowhere,
}


class Library:
    """The library's functions. Those that can fail raise ``NativeError``."""

    def __init__(self, path: Path) -> None:
        """Loads it.

        Raises:
            OSError: this system does not load it.
        """
        self.path = path
        giving_it_away = ctypes.CDLL(str(path))
        holding_the_lock = ctypes.PyDLL(str(path))
        self._functions: dict[str, Callable[..., object]] = {}
        for name, (result, arguments) in _FUNCTIONS.items():
            handle = holding_the_lock if name in _BRIEF else giving_it_away
            function = getattr(handle, f"pilotlight_{name}")
            function.restype, function.argtypes = result, arguments
            self._functions[name] = function

    def call(self, name: str, *arguments: object) -> None:
        """Calls a function that returns a result code.

        Raises:
            NativeError: it failed; the class says how, where that matters.
        """
        if code := self._functions[name](*arguments):
            assert isinstance(code, int)
            message = self._functions["error"]()
            assert isinstance(message, bytes)
            raise _ERRORS.get(code, NativeError)(code, message.decode(errors="replace"))

    def get(self, name: str, *arguments: object) -> int:
        """Calls a function that returns a number or a pointer; 0 for a null pointer."""
        value = self._functions[name](*arguments)
        return value if isinstance(value, int) else 0

    def text(self, name: str, *arguments: object) -> str:
        """Calls a function that returns text; empty for a null pointer."""
        value = self._functions[name](*arguments)
        return value.decode(errors="replace") if isinstance(value, bytes) else ""


def cache_folder() -> Path:
    """Where the library is made when the package was installed without it."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pilotlight" / "native"


@cache
def library() -> Library:
    """The library: beside this module, in the cache folder, or made there now.

    Raises:
        NativeUnavailable: there is none, and none can be made.
    """
    name = library_name()
    packaged, cached = Path(__file__).parent / name, cache_folder() / name
    if packaged.exists():
        try:
            return Library(packaged)
        except OSError:
            pass  # Compiled on a newer system than this one.
    try:
        compile_library(cached)
        return Library(cached)
    except (CannotCompile, OSError) as error:
        raise NativeUnavailable(f"pilotlight-native has no library: {error}") from error


def unavailable() -> str:
    """Why there is no library; empty where there is one. May compile it."""
    try:
        library()
    except NativeUnavailable as error:
        return str(error)
    return ""


def out(kind: type[c_int | c_uint64 | c_void_p | c_size_t]) -> tuple[object, Callable[[], int]]:
    """An argument that a function writes to, and a way to read it afterwards."""
    value = kind()
    return ctypes.byref(value), lambda: value.value or 0
