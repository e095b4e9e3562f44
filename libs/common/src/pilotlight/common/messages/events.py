"""Notifications in the JetStream stream EVENTS: what happened.

The owner's row or reply is the truth.
"""

from typing import Any

from msgspec import field

from pilotlight.common.messages.codec import Message

EVENTS_STREAM = "EVENTS"
EVENT_SUBJECTS = "v1.event.>"


def event_subject(service: str, kind: str) -> str:
    """``Event``; ``kind`` is a stable identifier such as ``model_registered``."""
    return f"v1.event.{service}.{kind}"


GATEWAY_EVENTS = event_subject("gateway", ">")
"""Models that were registered, changed or removed."""


class Event(Message, frozen=True, kw_only=True):
    """One thing that happened to one entity."""

    event_id: str
    kind: str
    entity: str
    at: str
    """RFC 3339, UTC, by the writer's clock."""
    data: dict[str, Any] = field(default_factory=dict[str, Any])
