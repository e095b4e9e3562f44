"""What the scheduler writes down beside the instances: decisions, and the record of each cold
start.

Values and pure functions.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from pilotlight.common.messages.phases import FirstToken, PhaseReport
from pilotlight.policy.cluster import DeviceKind
from pilotlight.policy.coldstart.decayed import Point
from pilotlight.policy.coldstart.facts import Usual
from pilotlight.policy.coldstart.timings import (
    LONG_PROMPT_TOKENS,
    StageSample,
    prompt_operations,
)
from pilotlight.policy.coverage import Coverage, aligned_s, coverage_of, load_seconds
from pilotlight.policy.estimates import ColdStartSample
from pilotlight.policy.ids import DecisionId, Epoch, InstanceId, ModelName
from pilotlight.policy.model import Model
from pilotlight.policy.phase import Moment, Phase, PhaseName
from pilotlight.policy.plan import Placement

MAX_PHASES = 4096
"""Of one cold start; past it further ones are dropped."""
_OVERHEAD = (
    PhaseName.SCHEDULE,
    PhaseName.DISPATCH,
    PhaseName.ACTIVATE,
    PhaseName.SUBMIT,
    PhaseName.DELIVER,
)
"""Phases of a start that no choice of workers changes."""
LATE_PHASES_S = 10.0
"""After the first token phases are still merged in for this long, and the figures made anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One decision, with what it was made from."""

    decision_id: DecisionId
    kind: str
    model: ModelName
    instance_id: InstanceId | None
    epoch: Epoch
    inputs: Any
    """JSON of the slice of the snapshot that the policy saw."""
    outcome: Any
    """With what was predicted, and the alternatives."""
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdStart:
    """A cold start from its demand to its first token, on the monotonic clock of the scheduler that
    dispatched it.
    """

    instance_id: InstanceId
    model: ModelName
    decision_id: DecisionId
    trace_id: str
    demand_seen_s: float
    wall_offset_s: float
    status: str = "open"
    dispatched_s: float | None = None
    end_s: float | None = None
    """First token; of a start that only an operator asked for, when it was ready."""
    queue_s: float | None = None
    ttft_s: float | None = None
    coverage: float | None = None
    phases: tuple[Phase, ...] = ()
    tpot_s: float | None = None
    """Of a decode step, as far as one is known so early; not kept in the record's row."""

    @property
    def closed(self) -> bool:
        """Its end is known."""
        return self.status != "open"


def trace_parent_of(record: ColdStart) -> str:
    """What a later leader's commands carry, so that a cold start stays one trace. Which span
    dispatched it is not kept: its place is taken by a number made from the trace's own, under which
    there is no span.
    """
    return f"00-{record.trace_id}-{record.trace_id[:16]}-01" if record.trace_id else ""


def merged(record: ColdStart, phases: Sequence[Phase]) -> ColdStart:
    """The record with more phases; repeated ones count once.

    A closed record's figures are made anew.
    """
    every = tuple(dict.fromkeys((*record.phases, *phases)))[:MAX_PHASES]
    record = replace(record, phases=every)
    figures = figures_of(record)
    return replace(record, coverage=figures.coverage) if figures is not None else record


def reported(record: ColdStart, report: PhaseReport) -> ColdStart:
    """The record after a report; the earliest first token ends it."""
    record = merged(record, report.phases)
    first = report.first_token
    if first is None or record.status == "abandoned":
        return record
    at_s = aligned_s(first.at_s, first.wall_offset_s, record.wall_offset_s)
    arrived_s = aligned_s(first.arrived_s, first.wall_offset_s, record.wall_offset_s)
    if record.end_s is not None:
        # Ready, and no gateway held a request: one may have been handed over while it loaded.
        unseen = record.ttft_s is None and arrived_s < record.end_s
        if not unseen and (record.ttft_s is None or record.end_s <= at_s):
            return record
    return _ended(record, at_s, first)


def readied(record: ColdStart, at_s: float) -> ColdStart:
    """The record of a start without a waiting request: it ends when it is ready, without a first
    token.
    """
    record = replace(record, status="done", end_s=at_s)
    figures = figures_of(record)
    return replace(record, coverage=figures.coverage if figures is not None else None)


def figures_of(record: ColdStart) -> Coverage | None:
    """Coverage and seconds by phase; None while the cold start has no end or was never
    dispatched.
    """
    if record.end_s is None or record.dispatched_s is None:
        return None
    offset_s = record.wall_offset_s
    start = Moment(at_s=record.dispatched_s, wall_offset_s=offset_s)
    return coverage_of(record.phases, start, Moment(at_s=record.end_s, wall_offset_s=offset_s))


def sample_of(record: ColdStart, model: Model, device_kind: DeviceKind) -> ColdStartSample | None:
    """What a finished cold start teaches; None for one without a first token."""
    figures = figures_of(record)
    if figures is None or record.ttft_s is None:
        return None
    seconds = {one.name: one.seconds for one in figures.seconds}

    loaded = load_seconds(figures.seconds)

    def rate(size_bytes: int, name: PhaseName) -> float | None:
        took_s = seconds.get(name, 0.0)
        return size_bytes / took_s if took_s > 0 else None

    return ColdStartSample(
        model=record.model,
        device_kind=device_kind,
        ttft_s=record.ttft_s,
        fetch_bytes_per_s=rate(model.spec.total_bytes, PhaseName.FETCH),
        load_bytes_per_s=rate(model.device_bytes(model.spec.whole), PhaseName.LOAD),
        prefill_s=seconds.get(PhaseName.PREFILL),
        prompt_tokens=max((one.tokens for one in record.phases), default=0),
        init_s=loaded.init_s,
        restore_s=loaded.restore_s,
        overhead_s=sum(seconds.get(name, 0.0) for name in _OVERHEAD),
    )


def stage_sample_of(sample: ColdStartSample, placement: Placement, model: Model) -> StageSample:
    """What a start of one stage teaches of its node and its source.

    Args:
        sample: What it showed.
        placement: Where it went, and from where its bytes came.
        model: Of it.
    """
    # A worker of an earlier release does not say how long the prompt was.
    tokens = sample.prompt_tokens or Usual().prompt_tokens
    fetched_all = placement.source and placement.fetch_bytes == model.spec.total_bytes
    return StageSample(
        model=sample.model,
        device_kind=sample.device_kind,
        node_id=placement.node_id,
        init_s=sample.init_s,
        restore_s=sample.restore_s,
        load_bytes_per_s=sample.load_bytes_per_s,
        source=placement.source,
        fetch_bytes_per_s=sample.fetch_bytes_per_s if fetched_all else None,
        prefill=Point(tokens, sample.prefill_s) if sample.prefill_s else None,
        operations_per_s=prompt_operations(model, tokens) / sample.prefill_s
        if sample.prefill_s and tokens >= LONG_PROMPT_TOKENS
        else None,
        overhead_s=sample.overhead_s,
    )


def lanes_of(placements: Iterable[Placement]) -> dict[str, str]:
    """The layers at each worker of a group and at each node, by id; empty for one worker alone.

    A node with several stages has no lane of its own: what its loader does is of all of them.
    """
    stages = list(placements)
    if len(stages) < 2:
        return {}
    lanes = {one.worker_id: f"{one.stage.start}-{one.stage.stop}" for one in stages}
    on_node = Counter(one.node_id for one in stages)
    return {
        **lanes,
        **{one.node_id: lanes[one.worker_id] for one in stages if on_node[one.node_id] == 1},
    }


def in_lane(report: PhaseReport, lane: str) -> PhaseReport:
    """The report of one stage of a group; without a lane, as it is."""
    if not lane:
        return report
    return msgspec.structs.replace(
        report, phases=tuple(replace(one, lane=lane) for one in report.phases)
    )


def _ended(record: ColdStart, at_s: float, first_token: FirstToken) -> ColdStart:
    arrived_s = aligned_s(first_token.arrived_s, first_token.wall_offset_s, record.wall_offset_s)
    record = replace(
        record,
        status="done",
        end_s=at_s,
        ttft_s=first_token.at_s - first_token.arrived_s,
        queue_s=max(0.0, record.demand_seen_s - arrived_s),
    )
    figures = figures_of(record)
    return replace(record, coverage=figures.coverage if figures is not None else None)
