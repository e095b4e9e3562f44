"""Lifecycle of a request on a stage: a table of moves, and nothing else.

``docs/states.md`` is rendered from ``TRANSITIONS``. An event that the table does not list for a
state is an error of ours.
"""

from enum import StrEnum

from pilotlight.engine.errors import EngineFailed


class RequestState(StrEnum):
    """Where a request stands. Only one that runs owns blocks."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    """It ran, gave its blocks to an older request, and will run again from its prompt and output so
    far."""
    ENDED = "ended"


class RequestEvent(StrEnum):
    """What can happen to a request."""

    TAKE_UP = "take_up"
    """It gets blocks for all of its tokens; those of its prefix that are cached are shared."""
    RUN = "run"
    """A step ran some of its tokens, and sampled the next one if they were the last."""
    PREEMPT = "preempt"
    """An older request lacks a block, and this is the youngest that runs."""
    FINISH = "finish"
    """Its last token is sampled, or cannot be."""
    DROP = "drop"
    """It is cancelled or goes on elsewhere, its deadline has passed, or its stage is dropped."""


_S = RequestState
_E = RequestEvent

TRANSITIONS: dict[tuple[RequestState, RequestEvent], RequestState] = {
    (_S.WAITING, _E.TAKE_UP): _S.RUNNING,
    (_S.RUNNING, _E.RUN): _S.RUNNING,
    (_S.RUNNING, _E.PREEMPT): _S.PREEMPTED,
    (_S.PREEMPTED, _E.TAKE_UP): _S.RUNNING,
    (_S.RUNNING, _E.FINISH): _S.ENDED,
    (_S.WAITING, _E.DROP): _S.ENDED,
    (_S.RUNNING, _E.DROP): _S.ENDED,
    (_S.PREEMPTED, _E.DROP): _S.ENDED,
}


def step(state: RequestState, event: RequestEvent) -> RequestState:
    """The state after an event.

    Raises:
        EngineFailed: the table has no such move.
    """
    following = TRANSITIONS.get((state, event))
    if following is None:
        raise EngineFailed(f"a request that is {state.value} cannot take {event.value}")
    return following
