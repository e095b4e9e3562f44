"""One process of ``bench/host_memory_gpu.py``: a kind of host memory, a line of JSON for each
measurement. A step that fails says so, and the others go on.

``python host_memory_job.py KIND FOLDER BYTES ROUNDS SECONDS DRIVER``.
"""

import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from host_memory_driver import Driver, Launches, Refused
from host_memory_kinds import (
    GIB,
    MIB,
    Imported,
    Region,
    Registered,
    Slabs,
    made,
    made_by_driver,
    system,
)
from host_memory_neighbour import Neighbour

from pilotlight.native.copier import Copier, Copy
from pilotlight.native.device import Device, DeviceArena
from pilotlight.native.library import NativeError

KINDS = ("tmpfs", "driver", "pageable", "memfd-huge", "hugetlb", "tmpfs-huge")
"""In the order in which they are measured: the last get what time is left."""
SLABS = (64 * MIB, 16 * MIB, 256 * MIB)
WATCHED_BYTES = GIB
"""As much is registered while launches are timed."""
TARGET_BYTES = GIB
ALONE_S = 0.2
DIGITS = 5
Told = dict[str, Any]
Step = tuple[str, Callable[[], Told]]


@dataclass
class Taken:
    """Slabs of the kind that is measured, and what another process needs to take them, too."""

    slabs: Slabs
    address: int
    descriptors: Sequence[int]
    order: Told


class Bench:
    """A device, and a kind of memory."""

    def __init__(self, kind: str, folder: str, num_bytes: int, rounds: int, path: str) -> None:
        """The driver of that ``path`` is up, and the device has memory to copy to."""
        self.kind, self._folder, self._num_bytes = kind, folder, num_bytes
        self._rounds, self._path = rounds, path
        self._device = Device(0, path)
        self._driver = Driver(path, self._device.context)
        self._target = DeviceArena(self._device, min(TARGET_BYTES, num_bytes))
        self._target.back(0, self._target.num_bytes, self._target.num_bytes)
        self._launches = Launches(self._driver, self._target.address)
        self._watched_bytes = min(WATCHED_BYTES, num_bytes)
        self._sizes = [size for size in SLABS if num_bytes % size == 0] or [num_bytes]
        self._region: Region | None = None
        self._other: Neighbour | None = None
        self._node = 0

    def steps(self) -> Iterator[Step]:
        """What is measured of the kind, in order."""
        if self.kind == "driver":
            yield "memory", self._making
            yield "a second process with a context writes", partial(self._written, context=True)
            yield "a second process without a context writes", partial(self._written, context=False)
            yield "a second process without a context makes", self._made_apart
            yield "a second process maps the descriptor by mmap", self._mapped_apart
            yield from self._steps("import")
            return
        told = system(self._folder)
        kind = "tmpfs" if self.kind == "pageable" else self.kind
        try:
            with made(kind, self._folder, self._num_bytes) as (self._region, said):
                yield "memory", lambda: told | said
                if self.kind == "pageable":
                    yield "copies through the ring", self._ring
                    address = self._region.address
                    yield "copies by the driver alone", partial(self._copies, address)
                    yield "launches beside copies through the ring", self._beside_ring
                else:
                    yield from self._steps("registration")
        except OSError as error:
            said = {"failed": str(error)}
            yield "memory", lambda: told | said

    def _steps(self, way: str) -> Iterator[Step]:
        for size in self._sizes:
            yield named(way, size), partial(self._attached, size)
        yield "copies", self._attached_copies
        for size in self._sizes:
            yield named(f"launches beside {way} in a thread", size), partial(self._in_thread, size)
        for size in self._sizes:
            name = named(f"launches beside {way} in another process", size)
            yield name, partial(self._elsewhere, size)

    @contextmanager
    def _taken(self, slab_bytes: int, num_bytes: int) -> Iterator[Taken]:
        """Slabs that are not attached yet; in the end they are not, either."""
        if self._region is not None:
            slabs = Registered(self._driver, self._region.address, num_bytes, slab_bytes)
            order = {"slab_bytes": slab_bytes, "num_bytes": num_bytes}
            try:
                yield Taken(slabs, self._region.address, (self._region.descriptor,), order)
            finally:
                slabs.detach()
            return
        memory = made_by_driver(self._driver, num_bytes, slab_bytes, self._node)
        try:
            imported = Imported(self._driver, memory.descriptors, slab_bytes, self._node)
            order = {"slab_bytes": slab_bytes, "node": self._node}
            try:
                yield Taken(imported, imported.address, memory.descriptors, order)
            finally:
                imported.close()
        finally:
            memory.close()

    def _making(self) -> Told:
        """All of it made and mapped, as its maker would."""
        size, said = self._sizes[0], self._driver.host_node()
        self._node = node = max(0, said)
        told: Told = {"host_node": said, "granule_bytes": self._driver.granule(node)}
        memory = made_by_driver(self._driver, self._num_bytes, size, node)
        try:
            slabs = Imported(self._driver, memory.descriptors, size, node)
            steps = {"create": memory.create_s, "export": memory.export_s, "map": slabs.attach()}
            began_s = time.perf_counter()
            ctypes.memset(slabs.address, 1, self._num_bytes)
            told["first_write_s_per_gib"] = (time.perf_counter() - began_s) * self._per_gib
            slabs.close()
        finally:
            memory.close()
        for name, seconds in steps.items():
            told[f"{name}_s_per_gib"] = sum(seconds) * self._per_gib
        return {
            **told,
            "spent_s": slabs.spent_s,
            "slab_bytes": size,
            **sampled({f"{name}_ms": scaled(values, 1e3) for name, values in steps.items()}),
        }

    @property
    def _per_gib(self) -> float:
        return GIB / self._num_bytes

    def _attached(self, slab_bytes: int) -> Told:
        """Slab after slab, and back."""
        samples: dict[str, list[float]] = {}
        with self._taken(slab_bytes, self._watched_bytes) as taken:
            for _ in range(self._rounds):
                for name, way in (("attach", taken.slabs.attach), ("detach", taken.slabs.detach)):
                    seconds = way()
                    note(samples, f"{name}_ms", statistics.median(seconds) * 1e3)
                    note(samples, f"longest_{name}_ms", max(seconds) * 1e3)
                    note(samples, f"{name}_s_per_gib", sum(seconds) * GIB / self._watched_bytes)
        return sampled(samples)

    def _copies(self, address: int) -> Told:
        """All of it to the device, by the driver."""
        samples: dict[str, list[float]] = {}
        target = self._target.address, self._target.num_bytes
        for _ in range(self._rounds):
            began_s = time.perf_counter()
            self._driver.copy(address, self._num_bytes, *target)
            note(samples, "gb_per_s", self._num_bytes / 1e9 / (time.perf_counter() - began_s))
        return sampled(samples)

    def _attached_copies(self) -> Told:
        with self._taken(self._sizes[0], self._num_bytes) as taken:
            attached_s = sum(taken.slabs.attach())
            return {"attach_s_per_gib": attached_s * self._per_gib, **self._copies(taken.address)}

    def _ring(self) -> Told:
        """As the project's copier takes what is not registered."""
        samples: dict[str, list[float]] = {}
        with closing(Copier(self._device)) as copier:
            for _ in range(self._rounds):
                (seconds,) = self._through(copier, alone=True)
                note(samples, "gb_per_s", self._num_bytes / 1e9 / seconds)
        return sampled(samples)

    def _through(self, copier: Copier, *, alone: bool) -> list[float]:
        assert self._region is not None
        size, source, target = self._target.num_bytes, self._region.address, self._target.address
        copies = [
            Copy(source + at, target, min(size, self._num_bytes - at))
            for at in range(0, self._num_bytes, size)
        ]
        began_s = time.perf_counter()
        copier.wait_done(copier.submit(copies, alone=alone))
        return [time.perf_counter() - began_s]

    def _beside_ring(self) -> Told:
        with closing(Copier(self._device)) as copier:
            return self._beside({"copy": partial(self._through, copier, alone=False)})

    def _in_thread(self, slab_bytes: int) -> Told:
        with self._taken(slab_bytes, self._watched_bytes) as taken:
            return self._beside({"attach": taken.slabs.attach, "detach": taken.slabs.detach})

    def _elsewhere(self, slab_bytes: int) -> Told:
        """The other process has not touched the memory before, as an engine that starts has not."""
        self._other = other = self._other or Neighbour(self._path)

        def ask(what: str) -> list[float]:
            return other.ask(what)["seconds"]

        try:
            with self._taken(slab_bytes, self._watched_bytes) as taken:
                other.ask("open", taken.descriptors, **taken.order)
                works = {name: partial(ask, name) for name in ("attach", "detach")}
                return self._beside(works)
        except OSError:
            self._other = None
            other.close()
            raise

    def _beside(self, works: Mapping[str, Callable[[], list[float]]]) -> Told:
        """The longest time of a launch and its wait, alone and beside each work.

        A round does all works in turn, so that the last undoes the first.
        """
        samples: dict[str, list[float]] = {}
        with ThreadPoolExecutor(1, initializer=self._driver.enter) as thread:
            for _ in range(self._rounds):
                for name, work in {"alone": _rest, **works}.items():
                    running = thread.submit(work)
                    found: list[float] = []
                    while not running.done() or not found:
                        began_s = time.perf_counter()
                        self._launches.once()
                        found.append((time.perf_counter() - began_s) * 1e3)
                    note(samples, f"{name}_longest_ms", max(found))
                    note(samples, f"{name}_p99_ms", p99(found))
                    note(samples, f"{name}_median_ms", statistics.median(found))
                    note(samples, f"{name}_s", sum(running.result()))
        return {"launched_by": self._launches.by, **sampled(samples)}

    def _written(self, *, context: bool) -> Told:
        """Whether what another process' cores write is what this one finds."""
        size, num_bytes = self._sizes[0], self._watched_bytes
        with (
            self._taken(size, num_bytes) as taken,
            closing(Neighbour(self._path, context=context)) as other,
        ):
            other.ask("open", taken.descriptors, **taken.order)
            seconds = other.ask("attach")["seconds"]
            told = other.ask("write")
            taken.slabs.attach()
            places = range(taken.address, taken.address + num_bytes, size)
            found = [int.from_bytes(ctypes.string_at(place, 8), "little") for place in places]
        return {
            "seen": found == list(range(len(places))),
            "spent_s": told["spent_s"],
            "import_s_per_gib": sum(seconds) * GIB / num_bytes,
            **sampled({"import_ms": scaled(seconds, 1e3)}),
        }

    def _made_apart(self) -> Told:
        order = {"num_bytes": self._watched_bytes, "slab_bytes": self._sizes[0], "node": self._node}
        with closing(Neighbour(self._path, context=False)) as other:
            told = other.ask("make", **order)
        return sampled({f"{name}_ms": scaled(values, 1e3) for name, values in told.items()})

    def _mapped_apart(self) -> Told:
        size = self._sizes[0]
        with (
            self._taken(size, size) as taken,
            closing(Neighbour(self._path, context=False)) as other,
        ):
            return other.ask("map", taken.descriptors, num_bytes=size)

    def close(self) -> None:
        """The other process ends."""
        if self._other is not None:
            self._other.close()


def _rest() -> list[float]:
    time.sleep(ALONE_S)
    return [ALONE_S]


def named(what: str, slab_bytes: int) -> str:
    """A measurement's name."""
    return f"{what}, slabs of {slab_bytes // MIB} MiB"


def scaled(values: Sequence[float], factor: float) -> list[float]:
    """Each in another unit."""
    return [value * factor for value in values]


def note(samples: dict[str, list[float]], name: str, value: float) -> None:
    """One sample more."""
    samples.setdefault(name, []).append(value)


def p99(values: Sequence[float]) -> float:
    """Their 99th percentile."""
    return sorted(values)[int(0.99 * (len(values) - 1))]


def sampled(samples: dict[str, list[float]]) -> Told:
    """Samples and their medians, as ``bench/results`` has them."""
    kept = {name: [round(value, DIGITS) for value in values] for name, values in samples.items()}
    return {
        "samples": kept,
        "medians": {
            name: round(statistics.median(values), DIGITS) for name, values in kept.items()
        },
    }


def tell(kind: str, what: str, told: Told) -> None:
    """A line."""
    print(json.dumps({"what": f"{kind}: {what}", **told}), flush=True)


def run(bench: Bench, seconds: float) -> None:
    """All steps, until the seconds are over; each that fails says why."""
    until_s = time.perf_counter() + seconds
    for what, step in bench.steps():
        if time.perf_counter() > until_s:
            tell(bench.kind, what, {"left_out": f"{seconds:g} s are over"})
            continue
        try:
            told = step()
        except (Refused, NativeError, OSError) as error:
            told = {"failed": f"{type(error).__name__}: {error}"}
        tell(bench.kind, what, told)


def main() -> None:
    """Measures one kind."""
    kind, folder, num_bytes, rounds, seconds, driver = sys.argv[1:]
    bench = Bench(kind, folder, int(num_bytes), int(rounds), driver)
    with closing(bench):
        run(bench, float(seconds))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # what is registered ends with the process
