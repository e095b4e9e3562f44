"""Policies that divide a cache's room."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class Sized(Protocol):
    """A policy whose choices depend on the cache's capacity."""

    def resize(self, capacity_bytes: int) -> None:
        """The cache is larger or smaller than before: a node has come, or gone."""
        ...
