"""How the stages of a pipeline on several hosts come to their channels: each connects to the next
one's door, the last one to stage 0's.

::

    stage 0   accepts ........................................ connects to stage 1
    stage 1   .................... connects to stage 2, accepts ^
    stage 2   connects to stage 0, accepts ^

A door lets a peer in only while it accepts, so if all connected first, none would be let in: stage
0 accepts first.
"""

from collections.abc import Callable
from dataclasses import dataclass

from pilotlight.common.handshake import Identity
from pilotlight.engine.channel.device_path import Devices
from pilotlight.engine.channel.door import Door
from pilotlight.engine.channel.tcp import TcpChannel, connect
from pilotlight.policy.ids import InstanceId, NodeId
from pilotlight.policy.model import Stage


@dataclass(frozen=True, slots=True)
class NextStage:
    """Where a stage's output goes."""

    node_id: NodeId
    address: tuple[str, int]
    """Of its door."""
    stage: Stage


def join(
    door: Door,
    me: Identity,
    instance_id: InstanceId,
    stage: Stage,
    following: NextStage,
    monotonic_s: Callable[[], float],
    timeout_s: float,
    devices: Devices | None = None,
) -> tuple[TcpChannel, TcpChannel]:
    """A stage's channels from the stage before and to the one behind it, for ``Engine.connect``.

    Args:
        door: where the stage before comes to.
        me: what this node proves.
        instance_id: the pipeline's.
        stage: this one.
        following: the next one; of the last stage, stage 0.
        monotonic_s: the clock of deadlines.
        timeout_s: for each of the two channels.
        devices: this process's device, as the door has it. What goes to the stage behind goes to
            its device from here on, where that can be.

    Raises:
        PeerLost, PeerSilent, PeerRefused: one of the neighbours cannot be had; both channels are
            closed.
    """

    def comes() -> TcpChannel:
        return door.accept(_about(instance_id, stage), timeout_s)

    def goes() -> TcpChannel:
        channel = connect(
            following.address,
            me,
            following.node_id,
            _about(instance_id, following.stage),
            monotonic_s,
            timeout_s,
            devices=devices,
        )
        channel.offer_device()
        return channel

    first, second = (comes, goes) if stage.start == 0 else (goes, comes)
    one = first()
    try:
        other = second()
    except BaseException:
        one.close()
        raise
    return (one, other) if stage.start == 0 else (other, one)


def _about(instance_id: InstanceId, receiver: Stage) -> str:
    """What a channel is about: the stage that it leads to."""
    return f"{instance_id}/{receiver.start}-{receiver.stop}"
