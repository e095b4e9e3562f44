"""Both ends of a channel over TCP, whose handshake they have behind them."""

import threading
from collections.abc import Callable
from time import monotonic
from typing import TypeVar

from pilotlight.common.cluster_key import ClusterKey
from pilotlight.common.handshake import CHANNEL_PURPOSE, Identity
from pilotlight.engine.channel.channel import WINDOW_FRAMES
from pilotlight.engine.channel.device_path import Devices
from pilotlight.engine.channel.door import Door
from pilotlight.engine.channel.tcp import TcpChannel, connect
from pilotlight.policy.ids import NodeId

HOST = "127.0.0.1"
KEY = ClusterKey(b"the key of this cluster", CHANNEL_PURPOSE)
HERE, THERE = Identity(NodeId("here"), KEY), Identity(NodeId("there"), KEY)


T = TypeVar("T")


def accepted(
    door: Door, about: str, comes: Callable[[], T], timeout_s: float = 10
) -> tuple[T, TcpChannel]:
    """What ``comes`` gave, called while the door is looked at, and the channel that it made
    there.
    """
    came: list[T] = []
    thread = threading.Thread(target=lambda: came.append(comes()))
    thread.start()
    channel = door.accept(about, timeout_s)
    thread.join(timeout_s)
    return came[0], channel


def tcp_channel(
    window: int = WINDOW_FRAMES, here: Devices | None = None, there: Devices | None = None
) -> tuple[TcpChannel, TcpChannel]:
    """The end that connected and the end that listened; each with its device, if it has one."""
    door = Door(THERE, (HOST, 0), monotonic, window=window, devices=there)
    try:
        one, other = accepted(
            door,
            "i",
            lambda: connect(
                (HOST, door.port), HERE, THERE.node_id, "i", monotonic, 10, window, here
            ),
        )
    finally:
        door.close()
    return one, other
