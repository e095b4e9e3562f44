"""Which slots of an arena hold a model."""

from pilotlight.engine.errors import NoRoom


class SlotTable:
    """The slots of one arena, by number.

    A model has a slot of its own, its home, which it may have to share with others.

    ::

        homes    A: 1   B: 3   C: 1
        slots    [ free )[ A )[ C )[ B )      C came after A, and lies in the next free slot
    """

    def __init__(self, num_slots: int) -> None:
        self._taken = [False] * num_slots

    @property
    def free(self) -> int:
        """How many more models could be opened."""
        return self._taken.count(False)

    def take(self, home: int | None = None) -> int:
        """A slot for one more model.

        1. Its home, where that is free: its addresses are then those of every other process.
        2. Else the next free slot behind its home, the first slot following the last.
        3. A model without a home: the lowest free slot.

        Raises:
            NoRoom: all are taken.
        """
        count = len(self._taken)
        first = 0 if home is None else home % count
        for number in (*range(first, count), *range(first)):
            if not self._taken[number]:
                self._taken[number] = True
                return number
        raise NoRoom("every slot of the arena holds a model")

    def give_back(self, number: int) -> None:
        """Makes a slot free again."""
        self._taken[number] = False
