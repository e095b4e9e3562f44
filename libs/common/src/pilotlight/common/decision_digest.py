"""What a tick said: its decisions as lines, and a digest of everything."""

import hashlib
from typing import Any, cast

import msgspec

from pilotlight.policy.control.plan import Holds, Plan


def said(plan: Plan) -> list[str]:
    """The decisions of a plan, a line each; holds are not among them."""
    lines = [
        f"{one.instance_id}: {', '.join(event.value for event in one.events)}: {one.reason}"
        for one in plan.changes
    ]
    lines += [f"drain {one.instance_id}: {one.reason}" for one in plan.drain]
    for order in plan.start:
        places = order.choice.scheme.placements if order.choice.scheme is not None else ()
        shown = ", ".join(f"{one.worker_id}[{one.stage.start}:{one.stage.stop}]" for one in places)
        lines.append(f"start {order.model.name} on {shown}: {order.choice.reason}")
    lines += [f"refuse {one.model}: {one.code}: {one.message}" for one in plan.refuse]
    lines += [f"retarget {one.instance_id}: {one.reason}" for one in plan.retarget]
    lines += [f"grow {one.instance_id}: {one.reason}" for one in plan.grow]
    return lines


def digest_of(plan: Plan) -> bytes:
    """Eight bytes that differ where what two plans say differs."""
    decided: list[object] = [
        plan.changes,
        plan.drain,
        sorted(plan.evicted.items()),
        [
            (one.model.name, one.reason, one.choice, one.demand_seen_s, one.ahead)
            for one in plan.start
        ],
        plan.retarget,
        plan.grow,
        [(one.model, one.code, one.message, one.reasons, one.record) for one in plan.refuse],
    ]
    everything = [
        _alike(msgspec.to_builtins(decided, order="deterministic")),
        _essence(plan.tell),
        _essence(plan.repeat),
    ]
    encoded = msgspec.msgpack.encode(everything, order="deterministic")
    return hashlib.blake2b(encoded, digest_size=8).digest()


def _essence(holds: Holds) -> list[object]:
    """What holds order, without the models, which the records have."""
    workers = [
        (told.worker_id, [(*one.essence, one.stage, one.device_bytes) for one in told.holds])
        for told in holds.workers
    ]
    nodes = [
        (told.node_id, [(*one.essence, one.parts, one.priority) for one in told.fetches])
        for told in holds.nodes
    ]
    return [workers, nodes]


def _alike(value: Any) -> Any:
    """With whole numbers as integers: a float field that held an integer comes back as a float."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case list() | tuple():
            return [_alike(one) for one in cast("list[Any]", value)]
        case dict():
            return {key: _alike(one) for key, one in cast("dict[Any, Any]", value).items()}
        case _:
            return value
