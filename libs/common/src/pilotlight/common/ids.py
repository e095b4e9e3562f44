"""Ids: a prefix that says what it names, then 96 random bits, safe in a NATS subject and in a
URL.
"""

import secrets

from pilotlight.policy.ids import (
    DecisionId,
    GatewayId,
    GrantId,
    InstanceId,
    NodeId,
    RequestId,
    WorkerId,
)


def _random(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"


def new_request_id() -> RequestId:
    """Id of one API request."""
    return RequestId(_random("req"))


def new_gateway_id() -> GatewayId:
    """Id of one gateway process; never reused."""
    return GatewayId(_random("gw"))


def new_instance_id() -> InstanceId:
    """Id of one instance, from plan to end."""
    return InstanceId(_random("inst"))


def new_decision_id() -> DecisionId:
    """Id of one recorded decision."""
    return DecisionId(_random("dec"))


def new_grant_id() -> GrantId:
    """Id of one grant of room."""
    return GrantId(_random("grant"))


def new_node_id() -> NodeId:
    """Id of a node; written to its state folder once and kept."""
    return NodeId(_random("node"))


def worker_id_of(node_id: NodeId, index: int) -> WorkerId:
    """Id of a node's worker for device ``index``: the same after a restart."""
    return WorkerId(f"{node_id}-w{index}")


def new_incarnation() -> str:
    """Tells one run of a process from the next."""
    return secrets.token_hex(6)


def new_file_id() -> str:
    """Id of a client's file."""
    return _random("file")


def new_batch_id() -> str:
    """Id of a batch of requests."""
    return f"batch_{secrets.token_hex(12)}"


def new_event_id() -> str:
    """Id of one event; the outbox uses it to publish exactly once."""
    return _random("ev")
