"""Random clusters for tests and benchmarks of the choice of a start."""

import math
import random
from dataclasses import replace

from pilotlight.policy.coldstart.contention import (
    FetchBooks,
    FetchKey,
    LinkName,
    Newcomer,
    incoming,
    outgoing,
)
from pilotlight.policy.coldstart.servers import Offer, Server, StartRequest
from pilotlight.policy.cost import stage_room
from pilotlight.policy.ids import NodeId, WorkerId
from pilotlight.policy.model import Model, Slo
from pilotlight.policy.testing import model, tiny_spec

GB = 10**9
REMOTE = "s3://models"


def start_model(
    *, layers: int = 8, layer_bytes: int = GB, edge_bytes: int = GB // 2, tied: bool = False
) -> Model:
    """A model of some layers, with an embedding and a head."""
    made = model("m", max_instances=8)
    head_bytes = 0 if tied else edge_bytes
    parts = (edge_bytes, *(layer_bytes,) * layers, head_bytes)
    spec = tiny_spec(dtype=made.dtype, num_layers=layers, part_bytes=parts, tied_embeddings=tied)
    return replace(made, spec=spec, slo=Slo(ttft_ms=7500, tpot_ms=200))


def start_server(number: int, *, node: str = "", offers: tuple[Offer, ...] = ()) -> Server:
    """A warm worker of a node of its own, with room for much."""
    node_id = NodeId(node or f"n{number}")
    return Server(
        worker_id=WorkerId(f"w{number}"),
        node_id=node_id,
        free_bytes=100 * GB,
        load_bytes_per_s=16.0 * GB,
        prefill_s=0.3,
        decode_s=0.04,
        offers=offers or (remote(node_id),),
    )


def remote(node_id: NodeId) -> Offer:
    """The model's own source, over the node's link."""
    return Offer(source=REMOTE, links=(incoming(node_id), outgoing(REMOTE)))


def peer(node_id: NodeId, other: NodeId, *, behind_s: float = 0.0) -> Offer:
    """Another node's host pool."""
    return Offer(source=other, links=(incoming(node_id), outgoing(other)), behind_s=behind_s)


def random_start(
    rng: random.Random, *, nodes: int, peers: int = 1, running: int = 4
) -> tuple[StartRequest, tuple[Server, ...]]:
    """A request and the servers that could take it.

    Nodes differ in links, rooms, speeds, copies and in what they fetch already. Every second
    cluster is of equal nodes but for that, as most are.

    Args:
        rng: What it is drawn with.
        nodes: How many, each with one worker or two.
        peers: Nodes with a copy in their host pools, at most; the model's own source is there, too.
        running: Fetches that run, at most.
    """
    made = start_model(
        layers=rng.choice([4, 8, 13]),
        layer_bytes=rng.choice([GB // 4, GB, 2 * GB]),
        edge_bytes=rng.choice([0, GB // 2, 2 * GB]),
        tied=rng.random() < 0.3,
    )
    whole = stage_room(made, made.spec.whole).least_bytes
    equal = rng.random() < 0.5
    ids = [NodeId(f"n{number}") for number in range(nodes)]
    capacities: dict[LinkName, float] = {
        incoming(one): (2.0 if equal else rng.uniform(0.5, 8)) * GB for one in ids
    }
    capacities |= {outgoing(one): rng.uniform(1, 8) * GB for one in ids}
    if rng.random() < 0.5:
        capacities[outgoing(REMOTE)] = rng.uniform(1, 40) * GB
    having = rng.sample(ids, rng.randint(0, min(peers, nodes)))
    servers: list[Server] = []
    for number, node_id in enumerate(ids):
        offers = [
            peer(node_id, one, behind_s=rng.choice([0.0, 0.0, 1.0]))
            for one in having
            if one != node_id
        ]
        parts = range(made.spec.num_layers + 2)
        some = parts if node_id in having else rng.sample(parts, rng.choice([0, 0, 0, 3]))
        for slot in range(rng.choice([1, 1, 2])):
            cold = rng.random() < 0.3
            servers.append(
                replace(
                    start_server(number, offers=(remote(node_id), *offers)),
                    worker_id=WorkerId(f"w{number}-{slot}"),
                    free_bytes=int(whole * rng.choice([0.3, 0.6, 1, 1, 2])),
                    granule_bytes=1 if equal else rng.choice([1, 1, GB // 50]),
                    load_bytes_per_s=(16 if equal else rng.uniform(4, 40)) * GB,
                    context_s=0.4 if cold else 0.0,
                    libraries_s=3.5 if cold else 0.0,
                    init_s=rng.choice([0.0, 0.0, 1.0]),
                    prefill_s=0.4 if equal else rng.uniform(0.05, 1.5),
                    decode_s=0.04 if equal else rng.uniform(0.01, 0.1),
                    present=frozenset(some),
                )
            )
    books = FetchBooks(capacities=capacities)
    for number in range(rng.randint(0, running)):
        links = (incoming(rng.choice(ids)), outgoing(rng.choice([REMOTE, *ids])))
        deadline_s = rng.choice([1.0, 3.0, 8.0, math.inf])
        size = rng.uniform(0.1, 4) * GB
        books = books.admit(
            [
                Newcomer(
                    key=FetchKey(f"f{number}"),
                    links=links,
                    fetch_bytes=size,
                    deadline_s=deadline_s,
                )
            ],
            0.0,
        )
    slo = Slo(ttft_ms=rng.choice([800, 2500, 5000, 12000]), tpot_ms=rng.choice([45, 100, 500]))
    request = StartRequest(
        model=replace(made, slo=slo), waited_s=rng.choice([0.0, 0.2]), books=books
    )
    return request, tuple(servers)
