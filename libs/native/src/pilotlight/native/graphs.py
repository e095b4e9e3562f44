"""Captured graphs as bytes, and graphs from such bytes: in another process whose arena lies at the
same addresses.
"""

import ctypes
import importlib.util
from collections.abc import Collection, Iterable, Mapping, Sequence
from ctypes import c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pilotlight.native.device import Device, DeviceArena
from pilotlight.native.library import MISUSED, NativeError, library, out

PARTS = ("images", "nodes", "instantiate", "upload")
"""Of restoring a graph."""

_recording = False
"""Images of kernels are kept."""


@dataclass(frozen=True, slots=True)
class GraphDump:
    """Graphs, written down with the images of their kernels."""

    archive: bytes
    """Executable: a process that loads it has checked where it comes from."""
    nodes: int
    kernels: int
    images: int
    image_bytes: int
    addresses_inside: int
    """Words of parameters that are addresses of the arena."""
    addresses_outside: int
    """Those that are addresses of other device memory or of pinned memory: unless it is 0, the
    archive fits this process alone."""
    images_whole: int = 0
    """Those kept with all of their kernels: they cannot be pruned, or the driver refused the used
    ones alone, or said other things of them."""
    params_unknown: int = 0
    """Kernels of which the driver says no parameters when their image is loaded again."""


@dataclass(frozen=True, slots=True)
class Offered:
    """What an archive took of the kernels that a process has loaded."""

    taken: int
    missing: tuple[str, ...]
    """Names of those that come from their images: they are not there, or others have their name, or
    the one that has it takes other parameters."""


def cupti_path() -> str:
    """Where CUPTI is: among NVIDIA's packages, or where the system's loader finds it."""
    found = importlib.util.find_spec("nvidia")
    folders = (found.submodule_search_locations or ()) if found is not None else ()
    return next(
        (str(path) for folder in folders for path in sorted(Path(folder).rglob("libcupti.so*"))),
        "libcupti.so",
    )


def record_images(cupti: str | None = None) -> None:
    """From now on, the image of every kernel module that this process loads is kept; to be called
    before the first.

    Raises:
        NoDriver: there is no CUPTI, or another tool in this process has it already.
    """
    global _recording
    library().call("images_record", (cupti or cupti_path()).encode())
    _recording = True


def add_image(image: bytes, function: int = 0) -> None:
    """Keeps an image that was had in another way.

    Args:
        image: as it was loaded.
        function: the driver's handle of a kernel that was loaded from it; 0: it is not known.

    Raises:
        NativeError: it holds no kernel.
    """
    library().call("images_add", image, len(image), function)


def kernel_loaded(image: bytes, function: int) -> None:
    """Keeps the image of a kernel that was just loaded, where this process records images.

    CUPTI tells no handles: of several kernels of one name, only who loads them knows which is
    whose.

    Args:
        image: as it was loaded.
        function: the driver's handle.

    Raises:
        NativeError: the image holds no kernel.
    """
    if _recording:
        add_image(image, function)


def recorded_images() -> tuple[int, int]:
    """How many images are kept, and their bytes."""
    pointer, num_bytes = out(c_uint64)
    return library().get("images_count", pointer), num_bytes()


def check_image(image: bytes) -> None:
    """Looks whether an image's own tables lie in it: the driver is given no length, and believes
    them.

    Raises:
        NativeError: they do not.
    """
    library().call("image_check", image, len(image))


def prune_image(image: bytes, keep: Iterable[str]) -> bytes:
    """A kernel image without the code of all kernels but those named.

    Raises:
        NativeError: its form is not understood, or it lacks one of them.
    """
    names = _zero_ended(keep)
    made = ctypes.create_string_buffer(len(image) + 4096)
    pointer, num_bytes = out(c_uint64)
    library().call("image_prune", image, len(image), names, len(names), made, len(made), pointer)
    return made.raw[: num_bytes()]


def _zero_ended(names: Iterable[str]) -> bytes:
    return b"".join(name.encode() + b"\0" for name in names)


def dump_graphs(
    graphs: Mapping[int, int],
    arena: DeviceArena,
    *,
    prune: bool = True,
    whole: Collection[str] = (),
) -> GraphDump:
    """Writes captured graphs down.

    Args:
        graphs: the driver's handles (``torch.cuda.CUDAGraph.raw_cuda_graph()``) by tags of the
            caller's, such as batch sizes.
        arena: where their memory lies.
        prune: leave out the kernels that no graph uses.
        whole: names of kernels whose images keep all of theirs nevertheless.

    Raises:
        NativeError: a node is of a kind that cannot be written down, or a kernel's image was not
            recorded.
    """
    native = library()
    handles, tags = (
        (c_uint64 * len(graphs))(*numbers) for numbers in (graphs.values(), graphs.keys())
    )
    (place, archive), (length, num_bytes) = out(c_void_p), out(c_uint64)
    report = (c_uint64 * 8)()
    kept = _zero_ended(whole)
    native.call(
        "graphs_dump",
        handles,
        tags,
        len(graphs),
        arena.address,
        arena.num_bytes,
        int(prune),
        kept,
        len(kept),
        place,
        length,
        report,
    )
    try:
        return GraphDump(ctypes.string_at(archive(), num_bytes()), *report)
    finally:
        native.get("free", archive())


class OpenArchive(NamedTuple):
    """One that the library opened by itself."""

    pointer: int
    num_graphs: int
    owner: object
    """Of the bytes that it reads."""


class GraphArchive:
    """Graphs that were written down, made again one by one.

    It needs the device's context and the arena, and no torch.
    """

    def __init__(
        self,
        device: Device,
        archive: bytes,
        arena: DeviceArena,
        opened: "OpenArchive | None" = None,
    ) -> None:
        """Reads it; builds nothing yet.

        Args:
            device: the arena's.
            archive: its bytes.
            arena: that the graphs are for.
            opened: the library's own, which is open already.

        Raises:
            AddressTaken: the arena lies elsewhere than the one that the graphs were made for.
            NativeError: it does not hold together.
        """
        self._library = device.library
        self._reads: object = archive if opened is None else opened.owner
        """What the library reads for as long as it is open."""
        if opened is None:
            (pointer, handle), (count, number) = out(c_void_p), out(c_uint64)
            given = archive, len(archive), arena.address
            self._library.call("archive_open", device.context, *given, pointer, count)
            self._pointer, num_graphs = handle(), number()
        else:
            self._pointer, num_graphs = opened.pointer, opened.num_graphs
        self._numbers = {
            self._library.get("archive_tag", self._pointer, number): number
            for number in range(num_graphs)
        }

    @property
    def tags(self) -> tuple[int, ...]:
        """Of all graphs in it."""
        return tuple(self._numbers)

    @property
    def spent_ms(self) -> dict[str, float]:
        """What restoring took so far, by ``PARTS``, in milliseconds."""
        parts = (c_uint64 * len(PARTS))()
        self._library.get("archive_spent", self._pointer, parts)
        return {name: ns / 1e6 for name, ns in zip(PARTS, parts, strict=True)}

    def offer(self, loaded: Mapping[str, Sequence[int]]) -> Offered:
        """Gives it kernels that this process has loaded, in the place of their images; before the
        first graph is loaded.

        Args:
            loaded: the driver's handles by name. Of two with one name none is taken: nobody says
                which is meant.
        """
        names: list[str] = []
        while name := self._library.text("archive_kernel", self._pointer, len(names)):
            names.append(name)
        missing: list[str] = []
        for number, name in enumerate(names):
            handles = loaded.get(name, ())
            try:
                if len(handles) != 1 or names.count(name) != 1:
                    raise NativeError(MISUSED, f"{len(handles)} kernels have the name {name}")
                self._library.call("archive_offer", self._pointer, number, handles[0])
            except NativeError:
                missing.append(name)
        return Offered(len(names) - len(missing), tuple(missing))

    def load(self, tag: int) -> None:
        """Loads the images that a graph needs; no memory of the arena is needed yet.

        Raises:
            NativeError: the driver refuses one. The process cannot be trusted with it any more.
        """
        self._library.call("archive_load", self._pointer, self._number(tag))

    def check_addresses(
        self, known: Sequence[tuple[int, int]], first: int, stop: int, tag: int | None = None
    ) -> int:
        """Looks at every word of parameters in [first, stop) that is an address; asks nothing of
        the driver.

        Args:
            known: where something lies, [start, stop) in order; none touches the next.
            first: addresses of what the graphs may use.
            stop: their end.
            tag: of the graph that is looked at; None: all.

        Returns:
            How many words are addresses of the arena outside of [first, stop). Some kernels have
            bytes in their parameters that they never read.

        Raises:
            Nowhere: one lies in [first, stop), and in nothing that is known; the message describes
                its node.
        """
        bounds = [bound for each in known for bound in each]
        pointer, elsewhere = out(c_uint64)
        places = (c_uint64 * len(bounds))(*bounds)
        number = 0 if tag is None else self._number(tag)
        until = len(self._numbers) if tag is None else number + 1
        graphs = self._pointer, number, until
        self._library.call(
            "archive_check_addresses", *graphs, places, len(known), first, stop, pointer
        )
        return elsewhere()

    def build(self, tag: int, stream: int = 0) -> None:
        """Makes a graph ready to be launched; what its memory copies touch is backed by now.

        Raises:
            NativeError: the driver refuses a part of it. The process cannot be trusted with it any
                more.
        """
        self._library.call("archive_build", self._pointer, self._number(tag), stream)

    def advance(self, tag: int, stream: int = 0) -> bool:
        """Does the next piece of that, as much as the driver does at once: a kernel's image, the
        nodes, the instantiation, the upload; whether there are others left.

        Raises:
            NativeError: as for ``build``.
        """
        pointer, left = out(c_uint64)
        self._library.call("archive_advance", self._pointer, self._number(tag), stream, pointer)
        return bool(left())

    def launch(self, tag: int, stream: int = 0) -> None:
        """Runs a graph that is built.

        Raises:
            NativeError: it is not, or the driver refuses.
        """
        self._library.call("archive_launch", self._pointer, self._number(tag), stream)

    def check_list(self, tag: int) -> None:
        """Looks whether a graph's nodes can be launched one by one; asks nothing of the device, and
        waits for no graph that another thread makes.

        Raises:
            NativeError: not all of its kernels are loaded, or the message says which of its nodes
                cannot be launched.
        """
        self._library.call("archive_check_list", self._pointer, self._number(tag))

    def launch_list(self, tag: int, stream: int = 0) -> None:
        """Launches a graph's nodes one by one, in an order in which each finds all that it waits
        for done. The graph need not be built, and may be being built by another thread.

        Raises:
            NativeError: see ``check_list``: nothing was launched; or the driver refuses a node: the
                process cannot be trusted with it any more.
        """
        self._library.call("archive_launch_list", self._pointer, self._number(tag), stream)

    def walk(self, tag: int, stream: int = 0) -> None:
        """Runs a graph's nodes one after the other and waits for each: to find the one that is
        wrong.

        Raises:
            NativeError: the driver refuses a node, or it fails; the message describes the node.
        """
        self._library.call("archive_walk", self._pointer, self._number(tag), stream)

    def close(self) -> None:
        """Gives graphs and kernels back."""
        if self._pointer:
            self._library.get("archive_close", self._pointer)
            self._pointer = 0

    def _number(self, tag: int) -> int:
        if tag not in self._numbers:
            raise NativeError(-1, f"the archive has no graph {tag}")
        return self._numbers[tag]
