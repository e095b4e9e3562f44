"""Settings of the scheduler."""

from pydantic import Field

from pilotlight.common.settings import DatabaseSettings, ServiceSettings


class SchedulerSettings(ServiceSettings, DatabaseSettings):
    """What the scheduler needs."""

    instance_requests: int = Field(
        16,
        ge=1,
        description="Waiting requests that one instance is expected to carry; more start another, up to `max_instances`.",
    )
    min_residency_s: float = Field(1.0, ge=0, description="A copy younger than this is not evicted.")
    hold_deadline_s: float = Field(
        10.0, gt=0, description="A live worker that does not take up a stage within this time has failed the instance."
    )
