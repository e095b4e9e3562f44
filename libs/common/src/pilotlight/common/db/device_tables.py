"""Tables of what devices' time went to, beside requests: cold starts, and models that are warm; and
of what the requests had of it.
"""

from sqlalchemy import Column, DateTime, Double, Table

from pilotlight.common.db.columns import count, key, metadata, text

start_costs = Table(
    "start_costs",
    metadata,
    key("instance_id"),
    key("worker_id"),
    text("model"),
    Column("at", DateTime(timezone=True), nullable=False, index=True),
    Column("device_s", Double, nullable=False),
    schema="gateway",
)
"""What the loads of cold starts had of devices, as their workers say."""

start_holds = Table(
    "start_holds",
    metadata,
    key("instance_id"),
    key("gateway_id"),
    key("key_id"),
    count("requests"),
    Column("at", DateTime(timezone=True), nullable=False, index=True),
    schema="gateway",
)
"""For whom instances were started: requests of each key that one gateway held for the model when it
heard of the start."""

idle_times = Table(
    "idle_times",
    metadata,
    key("instance_id"),
    key("worker_id"),
    Column("at", DateTime(timezone=True), primary_key=True, index=True),
    text("model"),
    Column("device_s", Double, nullable=False),
    schema="gateway",
)
"""What stages had of devices that nobody used, from their load on, as of an hour: ``at`` is when
the hour begins. What belongs to it is what it has more than the row before it."""

attainment = Table(
    "attainment",
    metadata,
    key("gateway_id"),
    key("model"),
    Column("at", DateTime(timezone=True), primary_key=True, index=True),
    count("first_tokens"),
    count("first_tokens_met"),
    count("answers"),
    count("answers_met"),
    schema="gateway",
)
"""How many requests of one gateway kept their model's SLO within a minute, which begins at
``at``.
"""
