"""What the engine's thread turns to, for a process that watches it from outside: one listener a
process, as there is one engine.

Said before it is done: what never ends can say nothing any more.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pilotlight.policy.hang import Doing
from pilotlight.policy.ids import InstanceId


def _unheard(doing: Doing, instance_id: InstanceId, tokens: int) -> None:
    return


Listener = Callable[[Doing, InstanceId, int], None]
"""What is done, for a batch of which instance, and how many tokens that has."""


@dataclass(slots=True)
class _Watched:
    listener: Listener = _unheard
    batch: tuple[InstanceId, int] = field(default=(InstanceId(""), 0))


_watched = _Watched()


def listen(listener: Listener) -> None:
    """Tell this listener from now on, and no other.

    It is called in the engine's thread, and must cost next to nothing.
    """
    _watched.listener = listener


def stepping(instance_id: InstanceId, tokens: int) -> None:
    """A batch is about to run."""
    _watched.batch = (instance_id, tokens)
    _watched.listener(Doing.STEPPING, instance_id, tokens)


@contextmanager
def compiling() -> Generator[None]:
    """Within a batch, something is done that later ones of its kind need not do: it may take far
    longer.
    """
    _watched.listener(Doing.COMPILING, *_watched.batch)
    try:
        yield
    finally:
        _watched.listener(Doing.STEPPING, *_watched.batch)
