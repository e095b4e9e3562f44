"""Shapes of ``/v1/models``."""

from pilotlight.gateway.catalog import CatalogEntry
from pilotlight.gateway.openai.types import ModelCard


def model_card(entry: CatalogEntry) -> ModelCard:
    """What clients see of a model."""
    return ModelCard(id=entry.model.name, created=entry.created_unix_s, max_model_len=entry.model.spec.max_context_tokens)
