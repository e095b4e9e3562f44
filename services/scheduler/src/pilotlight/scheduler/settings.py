"""Settings of the scheduler."""

from pathlib import Path

from pydantic import Field

from pilotlight.common.db.retention import PruneSettings
from pilotlight.common.settings import (
    DatabaseSettings,
    EvictionSettings,
    LoadSettings,
    ServiceSettings,
)
from pilotlight.policy.coldstart.policies import StartPolicy


class SchedulerSettings(
    ServiceSettings, DatabaseSettings, EvictionSettings, LoadSettings, PruneSettings
):
    """What the scheduler needs."""

    patience_slo_factor: float = Field(
        2.0,
        gt=0,
        description="A model that no instance serves waits for this multiple of its TTFT SLO; then a busy instance of another model makes "
        "room for it.",
    )
    min_service_loads: float = Field(
        2.0,
        ge=0,
        description="An instance serves for at least this multiple of what its load took, at most 60 s, before it makes room for others.",
    )
    start_policy: StartPolicy = Field(
        StartPolicy.PILOTLIGHT,
        description="Which policy chooses the worker of a start and where its bytes come from: `single` (the first that fits), `locality` "
        "(the least start-up time, by cached copies), `paraserve`, or `pilotlight`.",
    )
    max_stages: int = Field(
        1,
        ge=1,
        le=8,
        description="Workers that may share a start of one model: each, on a node or a GPU of its own, brings a range of its layers, and "
        "the first then takes on the whole model, or as few as have room for it share it for good. 1: every start has one worker.",
    )
    consolidate: bool = Field(
        True,
        description="Workers that share a start become one: the first takes on the whole model while it serves, and the others are "
        "free again. Else each keeps its layers for as long as the instance lasts.",
    )
    decision_log_dir: Path | None = Field(
        None,
        description="Folder for the decision log, which `pilotlight replay` reads. Unset: none is kept.",
    )
    decision_log_file_bytes: int = Field(
        128 << 20, ge=1 << 16, description="A file of the decision log that is longer is ended."
    )
    decision_log_bytes: int = Field(
        1 << 30, ge=1 << 16, description="Of all files of the decision log; the oldest go."
    )
    forecast_starts: bool = Field(
        False,
        description="Requests that are expected while a start is under way count with those that wait, so that a burst gets its "
        "instances at once. And instances that will soon be full get one more before a request waits, in free room.",
    )
    hold_deadline_s: float = Field(
        10.0,
        gt=0,
        description="A live worker that does not take up a stage within this time has failed the instance.",
    )
    drain_replace_s: float = Field(
        30.0,
        ge=0,
        description="A node that drains waits so long for replacements to serve before it lets its instances go anyway.",
    )
    instances_keep_days: float = Field(
        7.0, gt=0, description="Days for which instances that have ended are kept."
    )
    instances_max_rows: int = Field(
        100_000, ge=0, description="Ended instances that are kept at most; 0: no limit."
    )
    cold_starts_keep_days: float = Field(
        7.0, gt=0, description="Days for which finished cold starts are kept."
    )
    cold_starts_max_rows: int = Field(
        100_000, ge=0, description="Finished cold starts that are kept at most; 0: no limit."
    )
    decisions_keep_days: float = Field(
        7.0,
        gt=0,
        description="Days for which decisions are kept; the one that planned an instance is kept as long as the instance.",
    )
    decisions_max_rows: int = Field(
        100_000, ge=0, description="Such decisions that are kept at most; 0: no limit."
    )
    timings_keep_days: float = Field(
        90.0,
        gt=0,
        description="Days for which timings of starts are kept that no start has confirmed.",
    )
    timings_max_rows: int = Field(
        200_000, ge=0, description="Timings of starts that are kept at most; 0: no limit."
    )
