"""Answers of the admin API that are not rows or reports."""

from typing import Any

import msgspec
from pydantic import BaseModel

from pilotlight.gateway.models.repository import StoredModel


class WarmAccepted(BaseModel):
    """An instance is on its way, or ready."""

    instance_id: str


class EvictAccepted(BaseModel):
    """These instances are being released."""

    instance_ids: list[str]


MODEL_INTERNAL = frozenset({"engine"})
"""Fields of a model that the API does not show: it can choose none of them."""


def model_body(stored: StoredModel) -> dict[str, Any]:
    """A model as the API shows it."""
    fields: dict[str, Any] = msgspec.to_builtins(stored.model)
    body = {name: value for name, value in fields.items() if name not in MODEL_INTERNAL}
    body["created_at"] = stored.created_at.isoformat()
    body["updated_at"] = stored.updated_at.isoformat()
    body["materialize"] = stored.materialize.value
    return body
