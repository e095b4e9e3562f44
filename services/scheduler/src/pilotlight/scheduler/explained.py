"""What a row of ``decisions`` says: the inputs, the alternatives with what was predicted of them,
and, beside that, what came of it.

The whole world that a decision was made from is in the decision log; a row has what a reader needs
to follow it. Pure.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from pilotlight.common.db.mapping import to_row_json
from pilotlight.policy.model import Model
from pilotlight.policy.parallelism import SchemeChoice
from pilotlight.policy.phase import PhaseName
from pilotlight.policy.placement import Rejection
from pilotlight.policy.plan import Scheme, Snapshot
from pilotlight.scheduler.records import ColdStart, figures_of

MAX_WORKERS = 64
"""Of a decision's inputs, and of the workers that are said to have been no choice."""


def inputs_of(model: Model | None, seen: Snapshot, place: str) -> dict[str, Any]:
    """What a decision looked at, in short.

    ``models`` is what a new leader reads an instance's model from.

    Args:
        model: Which is to start; None: it is not registered.
        seen: What the choice was made from.
        place: In the decision log; empty: there is none.
    """
    name = model.name if model is not None else None
    demand = next((one for one in seen.demand if one.model == name), None)
    held = [one for one in seen.instances if one.model == name]
    return {
        "log": place,
        "now_s": seen.now_s,
        "models": [to_row_json(model)] if model is not None else [],
        "demand": None
        if demand is None
        else {
            "waiting": demand.waiting,
            "oldest_age_s": demand.oldest_age_s,
            "deadline_in_s": demand.deadline_in_s,
        },
        "instances": {one.instance_id: one.state.value for one in held},
        "workers": {
            one.worker_id: [one.node_id, one.free_bytes, len(one.held)]
            for one in seen.workers[:MAX_WORKERS]
        },
        "nodes": {
            one.node_id: [one.nic_bytes_per_s, len(one.transfers)]
            for one in seen.nodes[:MAX_WORKERS]
        },
    }


def outcome_of(choice: SchemeChoice) -> dict[str, Any]:
    """What was chosen, what it was compared with, and what is predicted."""
    return {
        "scheme": None if choice.scheme is None else _scheme(choice.scheme, whole=True),
        "instances": choice.instances,
        "meets_slo": choice.meets_slo,
        "needs_eviction": choice.needs_eviction,
        "expected_eviction": to_row_json(choice.eviction),
        "considered": [_scheme(one) for one in choice.considered],
    }


def rejections(rejected: Iterable[Rejection]) -> tuple[str, ...]:
    """Why workers were no choice, a line each; of many the first ones."""
    listed = [f"{one.worker_id}: {one.reason}" for one in rejected]
    left = len(listed) - MAX_WORKERS
    return (*listed[:MAX_WORKERS], *([f"and {left} others"] if left > 0 else []))


def actual_of(record: ColdStart) -> dict[str, Any]:
    """What came of a start, in the words of the prediction."""
    figures = figures_of(record)
    seconds = {one.name.value: one.seconds for one in figures.seconds} if figures else {}
    return {
        "status": record.status,
        "ttft_s": record.ttft_s,
        "tpot_s": record.tpot_s,
        "queue_s": record.queue_s,
        "phase_s": seconds,
    }


def _scheme(scheme: Scheme, *, whole: bool = False) -> dict[str, Any]:
    places = scheme.placements
    shown = {
        "pipeline_size": scheme.pipeline_size,
        "worker_ids": [one.worker_id for one in places],
        "sources": [one.source for one in places],
        "predicted_ttft_s": _finite(scheme.predicted_ttft_s),
        "predicted_tpot_s": _finite(scheme.predicted_tpot_s),
        "predicted_phase_s": _phases(scheme.predicted_phase_s),
        "refusal": scheme.refusal,
    }
    if whole:
        shown |= {
            "full_memory_workers": scheme.full_memory_workers,
            "placements": to_row_json(places),
        }
    return shown


def _phases(seconds: Mapping[PhaseName, float]) -> dict[str, float | None]:
    return {name.value: _finite(took_s) for name, took_s in seconds.items() if took_s > 0}


def _finite(value: float) -> float | None:
    """JSON has no infinity: what would take for ever has no figure."""
    return value if math.isfinite(value) else None
