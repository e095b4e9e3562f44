"""Facts for tests: one worker, one node, stages, copies."""

from pilotlight.policy.types import (
    Copy,
    Device,
    DeviceKind,
    Digest,
    Generation,
    HeldStage,
    HeldState,
    InstanceId,
    Liveness,
    ModelName,
    NodeFacts,
    NodeId,
    Stage,
    Tier,
    WorkerFacts,
    WorkerId,
)

WORKER, NODE = WorkerId("w"), NodeId("n")
MEMORY = 1000


def held(instance: str, size: int, state: HeldState = HeldState.READY) -> HeldStage:
    return HeldStage(
        instance_id=InstanceId(instance),
        generation=Generation(1),
        model=ModelName(f"model-{instance}"),
        digest=Digest(f"digest-{instance}"),
        stage=Stage(0, 4),
        state=state,
        device_bytes=size,
    )


def worker(*stages: HeldStage) -> WorkerFacts:
    device = Device(kind=DeviceKind.CPU, name="cpu", memory_bytes=MEMORY, load_bytes_per_s=1e9)
    return WorkerFacts(worker_id=WORKER, node_id=NODE, device=device, liveness=Liveness.ALIVE, held=stages)


def node(free: int, *copies: Copy) -> NodeFacts:
    return NodeFacts(
        node_id=NODE,
        host="h",
        liveness=Liveness.ALIVE,
        nic_bytes_per_s=1e9,
        pool_bytes=MEMORY,
        pool_free_bytes=free,
        copies=copies,
    )


def copy(digest: str, size: int) -> Copy:
    return Copy(digest=Digest(digest), node_id=NODE, tier=Tier.HOST, parts=(0,), size_bytes=size)
