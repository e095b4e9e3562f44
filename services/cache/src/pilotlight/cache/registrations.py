"""What is registered: models with their pins, and nodes that are to be empty."""

from pilotlight.cache.books import Books
from pilotlight.cache.repository import CacheRepository
from pilotlight.policy.eviction.candidates import registered
from pilotlight.policy.model import Model


class Registrations:
    """Brings the gateway's rows into the books."""

    def __init__(self, books: Books, repository: CacheRepository) -> None:
        """Has read nothing."""
        self._books = books
        self._repository = repository
        self._models: tuple[Model, ...] = ()

    async def follow(self) -> None:
        """The books know all that was answered to an administrator before this call.

        Raises:
            DatabaseUnavailable: the books are as they were.
        """
        models = await self._repository.models()
        self._books.draining = await self._repository.drains()
        if models is not self._models:
            self._models = models
            self._books.models = registered(models)
