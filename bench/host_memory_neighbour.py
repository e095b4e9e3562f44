"""Another process beside the one that ``host_memory_job.py`` measures in: an engine that registers
or imports the same memory, or one without a context of the device, as a loader is.

``python host_memory_neighbour.py DESCRIPTOR DRIVER CONTEXT``: the descriptor is of a socket, on
which each order is a message, with descriptors; CONTEXT is 1 or 0.
"""

import ctypes
import json
import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from host_memory_driver import Driver, Refused
from host_memory_kinds import Imported, Region, Registered, made_by_driver

from pilotlight.native.device import Device

MESSAGE_BYTES, MOST_DESCRIPTORS = 1 << 16, 250
ANSWER_S = 30.0
Told = dict[str, Any]


class Neighbour:
    """The other process, as this one sees it."""

    def __init__(self, driver: str, *, context: bool = True) -> None:
        """Starts it; returns when its driver is up.

        Raises:
            OSError: it does not come.
        """
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(ANSWER_S)
        command = [sys.executable, str(Path(__file__).resolve()), str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                [*command, driver, str(int(context))], pass_fds=[theirs.fileno()]
            )
        try:
            self._answer()
        except OSError:
            self.close()
            raise

    def ask(self, what: str, descriptors: Sequence[int] = (), **given: Any) -> Told:
        """One order, and what it says.

        Raises:
            OSError: it is refused there, or the process is gone.
        """
        message = json.dumps({"what": what, **given}).encode()
        if descriptors:
            socket.send_fds(self._socket, [message], list(descriptors))
        else:
            self._socket.sendall(message)
        return self._answer()

    def _answer(self) -> Told:
        message = self._socket.recv(MESSAGE_BYTES)
        if not message:
            raise OSError(f"the other process is gone: {self._process.wait(ANSWER_S)}")
        told: Told = json.loads(message)
        if "refused" in told:
            raise OSError(f"in the other process: {told['refused']}")
        return told

    def close(self) -> None:
        """It ends when nobody can ask it any more."""
        self._socket.close()
        try:
            self._process.wait(ANSWER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Served:
    """Within the other process: what it was given last."""

    def __init__(self, driver: Driver, *, device: bool) -> None:
        self._driver, self._device = driver, device
        self._descriptors: list[int] = []
        self._region: Region | None = None
        self._slabs: Registered | Imported | None = None
        self._slab_bytes = 0
        self.orders: dict[str, Callable[[Told, list[int]], Told]] = {
            "open": self._open,
            "attach": lambda *_: self._timed("attach"),
            "detach": lambda *_: self._timed("detach"),
            "write": self._write,
            "map": self._map,
            "make": self._make,
        }

    def _open(self, order: Told, descriptors: list[int]) -> Told:
        """Slabs of a region, of which there is one descriptor; or of the driver's, one each."""
        self._close()
        self._descriptors, self._slab_bytes = descriptors, order["slab_bytes"]
        if "node" in order:
            self._slabs = Imported(
                self._driver, descriptors, self._slab_bytes, order["node"], device=self._device
            )
        else:
            self._region = Region(descriptors[0], order["num_bytes"])
            given = self._region.address, order["num_bytes"], self._slab_bytes
            self._slabs = Registered(self._driver, *given)
        return {}

    def _timed(self, what: str) -> Told:
        assert self._slabs is not None
        found: list[float] = getattr(self._slabs, what)()
        return {"seconds": found}

    def _write(self, order: Told, descriptors: list[int]) -> Told:
        """Each slab's first bytes say its number, as the cores write them."""
        assert isinstance(self._slabs, Imported)
        began_s = time.perf_counter()
        for number in range(len(self._descriptors)):
            place = self._slabs.address + number * self._slab_bytes
            ctypes.memmove(place, number.to_bytes(8, "little"), 8)
        ctypes.memset(self._slabs.address + 8, 7, self._slab_bytes - 8)
        return {"seconds": [time.perf_counter() - began_s], "spent_s": self._slabs.spent_s}

    def _map(self, order: Told, descriptors: list[int]) -> Told:
        """Whether the system maps a descriptor of the driver's, without the driver."""
        try:
            with mmap.mmap(descriptors[0], order["num_bytes"]) as mapped:
                mapped[:8] = bytes(8)
            return {"mmap": "worked"}
        except (OSError, ValueError) as error:
            return {"mmap": str(error)}
        finally:
            for one in descriptors:
                os.close(one)

    def _make(self, order: Told, descriptors: list[int]) -> Told:
        """Memory of the driver's, made here."""
        made = made_by_driver(self._driver, order["num_bytes"], order["slab_bytes"], order["node"])
        told = {"create": made.create_s, "export": made.export_s}
        made.close()
        return told

    def _close(self) -> None:
        if isinstance(self._slabs, Imported):
            self._slabs.close()
        if self._region is not None:
            self._region.close()
        for one in self._descriptors:
            os.close(one)
        self._slabs = self._region = None


def main() -> None:
    """Does what it is asked for, until nobody asks."""
    descriptor, path, context = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "1"
    with socket.socket(fileno=descriptor) as channel:
        try:
            driver = Driver(path, Device(0, path).context if context else 0)
            served = Served(driver, device=context)
            channel.sendall(b"{}")
        except Refused as error:
            channel.sendall(json.dumps({"refused": str(error)}).encode())
            return
        while True:
            message, given, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, MOST_DESCRIPTORS)
            if not message:
                return
            order: Told = json.loads(message)
            try:
                told = served.orders[order["what"]](order, given)
            except (Refused, OSError) as error:
                told = {"refused": str(error)}
            with suppress(BrokenPipeError):
                channel.sendall(json.dumps(told).encode())


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # what is registered ends with the process
