"""Names of models in requests: registered ones, aliases, and the default."""

from collections.abc import Mapping
from typing import Protocol

from pilotlight.common.errors import BadRequest
from pilotlight.gateway.models.catalog import CatalogEntry
from pilotlight.policy.pooling import Task

ROUTES_OF = {
    Task.GENERATE: "/v1/chat/completions or /v1/completions",
    Task.EMBED: "/v1/embeddings",
    Task.SCORE: "/v1/rerank or /v1/score",
}
"""Where a model of each task is asked."""


def for_task(entry: CatalogEntry, task: Task) -> CatalogEntry:
    """The model, which is for this task.

    Raises:
        BadRequest: it is for another.
    """
    own = entry.model.spec.task
    if own is not task:
        raise BadRequest(
            f"{entry.model.name} is a model of the task {own}, and not {task}: ask it by {ROUTES_OF[own]}",
            param="model",
        )
    return entry


class Models(Protocol):
    """Which models there are (``Catalog``)."""

    def get(self, name: str) -> CatalogEntry | None:
        """One model, or None."""
        ...

    async def find(self, name: str) -> CatalogEntry | None:
        """As ``get``; looks again before it says None."""
        ...

    def names(self) -> tuple[str, ...]:
        """Every model's name, sorted."""
        ...


class NamedModels:
    """Models by the names that requests may use. A registered model goes before an alias."""

    def __init__(self, models: Models, aliases: Mapping[str, str], default: str) -> None:
        """Make it.

        Args:
            models: the registered ones.
            aliases: other names, with what each stands for.
            default: what a request without a name gets; empty: nothing.
        """
        self._models = models
        self._aliases = dict(aliases)
        self._default = default

    def get(self, name: str) -> CatalogEntry | None:
        """One model, or None."""
        found = self._models.get(name)
        return found or self._models.get(self._meant(name))

    async def find(self, name: str) -> CatalogEntry | None:
        """As ``get``; looks again before it says None.

        Raises:
            BadRequest: there is no name, and no default.
        """
        if not name and not self._default:
            raise BadRequest("this gateway has no default model: name one", param="model")
        return self.get(name) or await self._models.find(self._meant(name))

    def names(self) -> tuple[str, ...]:
        """Every name, sorted; aliases only of models that there are."""
        aliases = (alias for alias in self._aliases if self.get(alias) is not None)
        return tuple(sorted({*self._models.names(), *aliases}))

    def _meant(self, name: str) -> str:
        name = name or self._default
        return self._aliases.get(name, name)
