"""Kernels that this process has loaded already, for archives of graphs that need no images of
theirs: by name, from modules of which a kernel was launched (MEDUSA's triggering kernels), or by
symbol, from the libraries that they are compiled into.
"""

import ctypes
from collections.abc import Iterable, Iterator, Mapping
from ctypes import c_uint64, c_void_p
from functools import cache
from pathlib import Path

from pilotlight.native.library import NoDriver, library, out

MAPPED = Path("/proc/self/maps")
"""Libraries of this process are read there."""
CUDART = "libcudart.so"
SUCCESS, NO_DRIVER = 0, -3


def triggered_kernels(graphs: Iterable[int]) -> dict[str, list[int]]:
    """The driver's handles of all kernels in modules that have one in these graphs, by name.

    Several have one name where a compiler made it for several constants.

    Args:
        graphs: the driver's handles of captured graphs.

    Raises:
        NativeError: the driver refuses, or is older than CUDA 12.4.
    """
    handles = tuple(graphs)
    native, (place, text) = library(), out(c_void_p)
    native.call("graphs_kernels", (c_uint64 * len(handles))(*handles), len(handles), place)
    try:
        lines = ctypes.string_at(text()).decode(errors="replace").splitlines()
    finally:
        native.get("free", text())
    found: dict[str, list[int]] = {}
    for line in lines:
        handle, _, name = line.partition("\t")
        found.setdefault(name, []).append(int(handle))
    return found


class SymbolKernels(Mapping[str, list[int]]):
    """The driver's handles of kernels, by the symbols that their host functions have in libraries
    of this process: one is looked up when it is asked for.

    Kernels that were compiled at run time have none, and those of libraries that hide theirs.
    """

    def __init__(self, libraries: Iterable[str] | None = None, cudart: str | None = None) -> None:
        """Looks none up yet.

        Args:
            libraries: paths of those with kernels; None: all that this process has.
            cudart: CUDA's runtime; None: the one that this process has.

        Raises:
            NoDriver: there is no such library here.
        """
        mapped = mapped_libraries()
        path = cudart or next((one for one in mapped if Path(one).name.startswith(CUDART)), None)
        try:
            if path is None:
                raise OSError("this process has none")
            runtime = ctypes.CDLL(path)
            self._function_of, self._forget = runtime.cudaGetFuncBySymbol, runtime.cudaGetLastError
        except (OSError, AttributeError) as error:
            raise NoDriver(NO_DRIVER, f"no runtime of CUDA's names symbols: {error}") from error
        self._function_of.argtypes = [c_void_p, c_void_p]
        self._libraries = tuple(mapped if libraries is None else libraries)

    def __getitem__(self, name: str) -> list[int]:
        """Of one kernel.

        Raises:
            KeyError: no library has a symbol of that name that is a kernel.
        """
        for path in self._libraries:
            symbol = _symbol(path, name)
            handle = c_void_p()
            if not symbol:
                continue
            if self._function_of(ctypes.byref(handle), symbol) == SUCCESS and handle.value:
                return [handle.value]
            # Or the next that launches a kernel in this thread takes the error for its own.
            self._forget()
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        """Names are asked for, and not listed."""
        return iter(())

    def __len__(self) -> int:
        """See ``__iter__``."""
        return 0


def mapped_libraries() -> list[str]:
    """Paths of the libraries that this process has, each once."""
    fields = (line.split(maxsplit=5) for line in MAPPED.read_text().splitlines())
    paths = (one[5] for one in fields if len(one) == 6 and ".so" in Path(one[5]).name)
    return list(dict.fromkeys(path for path in paths if path.startswith("/")))


@cache
def _opened(path: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(path)
    except OSError:
        return None


def _symbol(path: str, name: str) -> int:
    """Where a library has a symbol; 0: it has none."""
    opened = _opened(path)
    try:
        return ctypes.addressof(ctypes.c_char.in_dll(opened, name)) if opened else 0
    except ValueError:
        return 0
