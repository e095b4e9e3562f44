"""The leader's books, and the one place that changes them: a row changes here only after its
transaction has committed.
"""

from dataclasses import dataclass, field

from pilotlight.policy.control.books import Books, Record
from pilotlight.policy.ids import InstanceId


@dataclass(slots=True)
class Book:
    """Holds the newest books. One writer: the leader's own tasks, on one event loop."""

    books: Books = field(default_factory=Books)

    def put(self, *records: Record) -> None:
        """Take records in, or in the place of what they were."""
        self.books = self.books.put(*records)

    def joined(self, record: Record) -> None:
        """Take in a start that is a row now: behind those that were before it, though it may have
        been decided earlier.
        """
        self.remove(record.instance.instance_id)
        self.put(record)

    def remove(self, instance_id: InstanceId) -> None:
        """Forget a start that came to nothing."""
        self.books = self.books.without((instance_id,))

    def get(self, instance_id: InstanceId) -> Record | None:
        """One record."""
        return self.books.get(instance_id)

    def rows(self) -> tuple[Record, ...]:
        """Records that are rows and have not ended."""
        return self.books.rows()
