"""Names of things: what tells a model, a node, an instance, a request from the others."""

from typing import NewType

ModelName = NewType("ModelName", str)
NodeId = NewType("NodeId", str)
WorkerId = NewType("WorkerId", str)
InstanceId = NewType("InstanceId", str)
GatewayId = NewType("GatewayId", str)
RequestId = NewType("RequestId", str)
DecisionId = NewType("DecisionId", str)
GrantId = NewType("GrantId", str)
Digest = NewType("Digest", str)
"""Lower-case hex of a BLAKE3 hash."""
Epoch = NewType("Epoch", int)
"""The scheduler's fencing number; a command with an older epoch is refused."""
Generation = NewType("Generation", int)
"""The version of one instance's desired stages; commands are idempotent by (instance, generation).
"""
