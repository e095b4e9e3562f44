"""Small worlds for tests of policies and of services that call them: builders of facts, with
defaults.
"""

from dataclasses import replace
from typing import Any, TypedDict, Unpack

from pilotlight.policy.cluster import (
    Copy,
    Device,
    DeviceHealth,
    DeviceKind,
    HeldStage,
    HeldState,
    Liveness,
    NodeFacts,
    Tier,
    WorkerFacts,
)
from pilotlight.policy.cost import stage_room
from pilotlight.policy.ids import (
    DecisionId,
    Digest,
    Epoch,
    Generation,
    InstanceId,
    ModelName,
    NodeId,
    WorkerId,
)
from pilotlight.policy.materialized import Environment
from pilotlight.policy.model import Dtype, Model, ModelSpec, ScalingBounds, Slo, Stage
from pilotlight.policy.multicast import ChainPlan
from pilotlight.policy.plan import Instance, InstanceState, Placement, Snapshot
from pilotlight.policy.request import Demand

NOW_S = 1000.0
CONTEXT_TOKENS = 8


def tiny_spec(**changes: Any) -> ModelSpec:
    """A Llama of two layers, with some fields changed.

    Its parts have no bytes where ``part_bytes`` is not given.
    """
    made = ModelSpec(
        architecture="LlamaForCausalLM",
        dtype=Dtype.FLOAT32,
        num_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=97,
        max_context_tokens=256,
        rope_theta=10_000.0,
        rope_scaling=None,
        rms_norm_eps=1e-5,
        tied_embeddings=False,
        attention_bias=False,
        part_bytes=(),
    )
    made = replace(made, **changes)
    return (
        made if "part_bytes" in changes else replace(made, part_bytes=(0,) * (made.num_layers + 2))
    )


def spec(part_bytes: int = 10) -> ModelSpec:
    """Four layers, an embedding and a head of ``part_bytes`` each."""
    return tiny_spec(
        dtype=Dtype.BFLOAT16,
        num_layers=4,
        hidden_size=2,
        intermediate_size=4,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        vocab_size=16,
        max_context_tokens=CONTEXT_TOKENS,
        part_bytes=(part_bytes,) * 6,
    )


class Bounds(TypedDict, total=False):
    """Fields of ``ScalingBounds``."""

    min_instances: int
    max_instances: int
    keep_alive_s: float


def model(
    name: str = "m",
    *,
    digest: str = "",
    part_bytes: int = 10,
    pinned: bool = False,
    **bounds: Unpack[Bounds],
) -> Model:
    """A model of 60 bytes, and some more for KV."""
    return Model(
        name=ModelName(name),
        uri=f"file:///{name}",
        revision=None,
        source_version="1",
        digest=Digest(digest or f"d-{name}"),
        text_digest=Digest("t"),
        dtype=Dtype.BFLOAT16,
        spec=spec(part_bytes),
        slo=Slo(ttft_ms=2000, tpot_ms=100),
        scaling=ScalingBounds(**bounds),
        pinned=pinned,
    )


def held(
    name: str = "m",
    instance_id: str = "i",
    *,
    device_bytes: int = 100,
    state: HeldState = HeldState.READY,
    in_flight: int = 0,
) -> HeldStage:
    """One whole stage of the model ``name``."""
    return HeldStage(
        instance_id=InstanceId(instance_id),
        generation=Generation(1),
        model=ModelName(name),
        digest=Digest(f"d-{name}"),
        stage=Stage(0, 4),
        state=state,
        device_bytes=device_bytes,
        in_flight=in_flight,
    )


def worker(
    index: int = 0,
    *,
    memory_bytes: int = 1000,
    held_stages: tuple[HeldStage, ...] = (),
    liveness: Liveness = Liveness.ALIVE,
    engine_up: bool = True,
    health: DeviceHealth | None = None,
) -> WorkerFacts:
    """Worker ``w<index>`` on node ``n0``."""
    return WorkerFacts(
        worker_id=WorkerId(f"w{index}"),
        node_id=NodeId("n0"),
        device=Device(
            kind=DeviceKind.SIM, name="sim", memory_bytes=memory_bytes, load_bytes_per_s=1000.0
        ),
        liveness=liveness,
        held=held_stages,
        engine_up=engine_up,
        health=health or DeviceHealth(),
    )


def node(
    *,
    pool_bytes: int = 10_000,
    pool_free_bytes: int | None = None,
    copies: tuple[Copy, ...] = (),
    draining: bool = False,
    liveness: Liveness = Liveness.ALIVE,
) -> NodeFacts:
    """Node ``n0``; its host pool is free but for what the copies take, unless told otherwise."""
    left_bytes = pool_bytes - sum(one.size_bytes for one in copies)
    return NodeFacts(
        node_id=NodeId("n0"),
        host="h",
        liveness=liveness,
        nic_bytes_per_s=100.0,
        pool_bytes=pool_bytes,
        pool_free_bytes=left_bytes if pool_free_bytes is None else pool_free_bytes,
        copies=copies,
        draining=draining,
    )


def copy(name: str = "m", *, size_bytes: int = 60) -> Copy:
    """A copy of the model ``name`` in the host pool of node ``n0``."""
    return Copy(
        digest=Digest(f"d-{name}"),
        node_id=NodeId("n0"),
        tier=Tier.HOST,
        parts=(0,),
        size_bytes=size_bytes,
    )


def instance(
    name: str = "m",
    instance_id: str = "i",
    *,
    state: InstanceState = InstanceState.READY,
    worker_id: str = "w0",
    since_s: float = NOW_S - 100,
    used_s: float | None = None,
    in_flight: int = 0,
    digest: str = "",
    device_bytes: int = 100,
    served: bool = False,
) -> Instance:
    """An instance with one stage on ``worker_id``."""
    placement = Placement(
        worker_id=WorkerId(worker_id),
        node_id=NodeId("n0"),
        stage=Stage(0, 4),
        device_bytes=device_bytes,
    )
    return Instance(
        instance_id=InstanceId(instance_id),
        model=ModelName(name),
        digest=Digest(digest or f"d-{name}"),
        state=state,
        generation=Generation(1),
        epoch=Epoch(1),
        placements=(placement,),
        decision_id=DecisionId("dec"),
        state_since_s=since_s,
        last_used_s=since_s if used_s is None else used_s,
        in_flight=in_flight,
        served=served,
    )


def demand(name: str = "m", waiting: int = 1) -> Demand:
    """Requests that wait for the model ``name``."""
    return Demand(model=ModelName(name), waiting=waiting, oldest_age_s=0.1, deadline_in_s=10.0)


ROOM_BYTES = stage_room(model(), model().spec.whole).least_bytes
"""What a device has to have for an instance of ``model()``."""


def world(
    *instances: Instance,
    waiting: tuple[Demand, ...],
    places: int = 3,
    place_bytes: int = ROOM_BYTES,
    models: tuple[Model, ...] = (),
) -> Snapshot:
    """Workers on one node, whose devices hold one instance unless told otherwise, and report what
    they hold.
    """
    states = {
        InstanceState.READY: HeldState.READY,
        InstanceState.DRAINING: HeldState.DRAINING,
        InstanceState.LOADING: HeldState.LOADING,
    }

    def there(index: int) -> WorkerFacts:
        here = [one for one in instances if one.lead == f"w{index}" and one.state in states]
        stages = tuple(
            held(
                one.model,
                one.instance_id,
                state=states[one.state],
                in_flight=one.in_flight,
                device_bytes=ROOM_BYTES,
            )
            for one in here
        )
        return worker(index, memory_bytes=place_bytes, held_stages=stages)

    named = {one.name: one for one in models}
    names = {*(one.model for one in instances), *(one.model for one in waiting)}
    return Snapshot(
        now_s=NOW_S,
        epoch=Epoch(1),
        models=tuple(named.get(name) or model(name) for name in sorted(names)),
        nodes=(node(),),
        workers=tuple(there(index) for index in range(places)),
        instances=instances,
        demand=waiting,
    )


def nodes_named(names: str) -> tuple[NodeId, ...]:
    """Ids of nodes, from their names with spaces in between."""
    return tuple(NodeId(name) for name in names.split())


def members(plan: ChainPlan) -> dict[str | None, tuple[str, ...]]:
    """The members of each chain, by its source."""
    return {chain.source: chain.members for chain in plan.chains}


def environment(**changes: Any) -> Environment:
    """What an engine runs on, with some fields changed."""
    made = Environment(
        engine="0.1.0+ab",
        device_kind=DeviceKind.CPU,
        device_name="cpu (2 threads)",
        memory_bytes=0,
        driver="",
        cuda="",
        torch="2.13.0",
        kernels="",
        arena_address=1 << 44,
        granule_bytes=1,
        step_tokens=512,
    )
    return replace(made, **changes)
