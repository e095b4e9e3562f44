"""NIXL, as far as it is used here: memory of this host that others may read, and one-sided reads of
theirs.

For the reader process alone. NIXL is an optional package (``pip install
'pilotlight-dataplane[nixl]'``) and brings UCX along, which chooses the way: RDMA where there is a
device, shared memory within a host, TCP (``UCX_TLS``, ``UCX_NET_DEVICES``).
"""

import importlib
import os
from typing import Any, Protocol

PACKAGES = ("nixl_cu13", "nixl_cu12")
"""`nixl` itself chooses among them by the CUDA that torch was built for, and imports torch to find
out. Host memory needs neither."""
HOST_MEMORY = "DRAM"


class NotInstalled(Exception):
    """There is no NIXL."""


class ReadFailed(Exception):
    """A one-sided read ended with an error, or could not be begun."""


class Agent(Protocol):
    """What the reader process needs of a library for one-sided reads. For one thread."""

    def register(self, memory: memoryview) -> int:
        """Memory that takes part: where it lies."""
        ...

    def offer(self) -> bytes:
        """What another agent has to know to read all that is registered by now."""
        ...

    def learn(self, agent: bytes) -> str:
        """The name of another one, which said this of itself."""
        ...

    def forget(self, name: str) -> None:
        """It will be read from no more."""
        ...

    def read(self, name: str, theirs: int, ours: int, size_bytes: int) -> Any:
        """Begin to read: a handle for ``is_done``.

        Args:
            name: The other agent's, as ``learn`` returned it.
            theirs: Address in its memory to read from.
            ours: Address in memory of this process that is registered, to write to.
            size_bytes: How much to read.

        Raises:
            ReadFailed: it cannot.
        """
        ...

    def is_done(self, read: Any) -> bool:
        """Whether all bytes have come; then nothing is written any more, and the handle is of no
        use.

        Raises:
            ReadFailed: not all of them will.
        """
        ...

    def progress(self) -> None:
        """Carry on with everything, also with what others read here; returns at once."""
        ...


class NixlAgent:
    """``Agent`` over NIXL and UCX."""

    def __init__(self, name: str) -> None:
        """Raises ``NotInstalled``."""
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
        api = _api()
        # Its own thread would take a whole core for itself, also while nothing is read.
        config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent = api.nixl_agent(name, config)
        self._begun: list[Any] = []
        """Reads that could not be begun: a handle that is dropped lets go of memory that may still
        be written to."""
        if "UCX" not in self._agent.backends:
            raise NotInstalled("NIXL has no UCX here")

    def register(self, memory: memoryview) -> int:
        """As ``Agent.register``."""
        import numpy as np

        address = int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
        self._agent.register_memory([(address, len(memory), 0, "")], HOST_MEMORY)
        return address

    def offer(self) -> bytes:
        """As ``Agent.offer``."""
        return bytes(self._agent.get_agent_metadata())

    def learn(self, agent: bytes) -> str:
        """As ``Agent.learn``."""
        name = self._agent.add_remote_agent(agent)
        return name.decode() if isinstance(name, bytes) else str(name)

    def forget(self, name: str) -> None:
        """As ``Agent.forget``."""
        self._agent.remove_remote_agent(name)

    def read(self, name: str, theirs: int, ours: int, size_bytes: int) -> Any:
        """As ``Agent.read``."""
        try:
            here = self._agent.get_xfer_descs([(ours, size_bytes, 0)], HOST_MEMORY)
            there = self._agent.get_xfer_descs([(theirs, size_bytes, 0)], HOST_MEMORY)
            read = self._agent.initialize_xfer("READ", here, there, name)
            self._begun.append(read)
            state = self._agent.transfer(read)
        except Exception as error:
            raise ReadFailed(_said(error)) from error
        if state == "ERR":
            raise ReadFailed("the read was not taken")
        self._begun.pop()
        return read

    def is_done(self, read: Any) -> bool:
        """As ``Agent.is_done``."""
        try:
            state = self._agent.check_xfer_state(read)
        except Exception as error:
            raise ReadFailed(_said(error)) from error
        if state == "ERR":
            raise ReadFailed("the read broke off")
        if state == "DONE":
            self._agent.release_xfer_handle(read)
        return state == "DONE"

    def progress(self) -> None:
        """As ``Agent.progress``."""
        self._agent.get_new_notifs()


def _api() -> Any:
    broken: list[str] = []
    for package in PACKAGES:
        try:
            return importlib.import_module(f"{package}._api")
        except ImportError as error:
            if error.name != package:
                broken.append(f"{package} cannot be imported: {error}")
    raise NotInstalled(
        "; ".join(broken) or "NIXL is not installed: pip install 'pilotlight-dataplane[nixl]'"
    )


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
