"""Lifecycle of an instance: a table of moves, and nothing else.

``docs/states.md`` is rendered from ``TRANSITIONS``; a test keeps them equal. An event that the
table does not list for a state is an error of ours, never ignored: reports that say nothing new
must be filtered before they become events.
"""

from enum import StrEnum

from pilotlight.policy.plan import InstanceState


class InstanceEvent(StrEnum):
    """What can happen to an instance."""

    FETCH_STARTED = "fetch_started"
    """Its commands are out: loaders move bytes."""
    LOAD_STARTED = "load_started"
    """A worker reports its stage as loading."""
    ALL_STAGES_READY = "all_stages_ready"
    """Every worker of the group reports its stage as ready."""
    STAGE_LOST = "stage_lost"
    """A worker of its group is lost, and another one brings its stage."""
    CONSOLIDATION_STARTED = "consolidation_started"
    CONSOLIDATION_DONE = "consolidation_done"
    DRAIN = "drain"
    """Scale-down, eviction by an operator, or the model is gone: no new requests."""
    RELEASED = "released"
    """No worker holds a stage of it any more."""
    FAIL = "fail"
    """A worker died, a stage failed, or the cold start missed its last deadline."""


class IllegalTransition(ValueError):
    """An event that the table does not allow in the state."""


_S = InstanceState
_E = InstanceEvent

TRANSITIONS: dict[tuple[InstanceState, InstanceEvent], InstanceState] = {
    (_S.PLANNED, _E.FETCH_STARTED): _S.FETCHING,
    (_S.FETCHING, _E.LOAD_STARTED): _S.LOADING,
    (_S.LOADING, _E.ALL_STAGES_READY): _S.READY,
    (_S.LOADING, _E.STAGE_LOST): _S.LOADING,
    (_S.READY, _E.STAGE_LOST): _S.LOADING,
    (_S.READY, _E.CONSOLIDATION_STARTED): _S.CONSOLIDATING,
    (_S.CONSOLIDATING, _E.CONSOLIDATION_DONE): _S.READY,
    (_S.PLANNED, _E.DRAIN): _S.DRAINING,
    (_S.FETCHING, _E.DRAIN): _S.DRAINING,
    (_S.LOADING, _E.DRAIN): _S.DRAINING,
    (_S.READY, _E.DRAIN): _S.DRAINING,
    (_S.CONSOLIDATING, _E.DRAIN): _S.DRAINING,
    (_S.DRAINING, _E.RELEASED): _S.GONE,
    (_S.PLANNED, _E.FAIL): _S.FAILED,
    (_S.FETCHING, _E.FAIL): _S.FAILED,
    (_S.LOADING, _E.FAIL): _S.FAILED,
    (_S.READY, _E.FAIL): _S.FAILED,
    (_S.CONSOLIDATING, _E.FAIL): _S.FAILED,
    (_S.DRAINING, _E.FAIL): _S.FAILED,
}

STARTING = frozenset({_S.PLANNED, _S.FETCHING, _S.LOADING})
"""On its way to its first token."""
BRINGING = STARTING | {_S.CONSOLIDATING}
"""Its nodes bring parts that they may lack: all of a start's, those of the added layers where a
stage grows."""
SERVING = frozenset({_S.READY, _S.CONSOLIDATING})
"""Takes new requests."""
ENDED = frozenset({_S.GONE, _S.FAILED})
"""Holds nothing, and never will again."""


def step(state: InstanceState, event: InstanceEvent) -> InstanceState:
    """The state after an event.

    Raises:
        IllegalTransition: the table has no such move.
    """
    following = TRANSITIONS.get((state, event))
    if following is None:
        raise IllegalTransition(f"an instance that is {state.value} cannot take {event.value}")
    return following


def path(state: InstanceState, target: InstanceState) -> tuple[InstanceEvent, ...]:
    """Shortest series of events from a state to another, for a reader of reports that missed the
    ones between.

    A worker that loads within one report interval is first seen as ready; the moves in between are
    then made up, one by one, so that history is complete.

    Raises:
        IllegalTransition: no series of events leads there.
    """
    seen: dict[InstanceState, tuple[InstanceEvent, ...]] = {state: ()}
    frontier = [state]
    while frontier:
        current = frontier.pop(0)
        if current is target:
            return seen[current]
        for (source, event), following in TRANSITIONS.items():
            if source is current and following not in seen:
                seen[following] = (*seen[current], event)
                frontier.append(following)
    raise IllegalTransition(f"nothing leads from {state.value} to {target.value}")
