"""What may be said of a model when it is registered or changed.

Unknown fields are refused: a misspelt option must not be ignored in silence.
"""

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*$"
"""Parts as in ``org/name``, none of them empty or of dots alone: a name is also a path of the API.
"""
MAX_NAME_CHARS = 128
MAX_MS = 86_400_000.0
_NAME = re.compile(NAME_PATTERN.rstrip("$"))


def may_be_registered(name: str) -> bool:
    """Whether there can be a model of this name."""
    return len(name) <= MAX_NAME_CHARS and _NAME.fullmatch(name) is not None


class Body(BaseModel):
    """Base of request bodies."""

    model_config = ConfigDict(extra="forbid", strict=True)


class SloBody(Body):
    """What the model must meet."""

    ttft_ms: float = Field(gt=0, le=MAX_MS, allow_inf_nan=False, description="Time to first token.")
    tpot_ms: float = Field(
        gt=0, le=MAX_MS, allow_inf_nan=False, description="Time per output token."
    )
    attainment: float = Field(
        0.99, gt=0, le=1, allow_inf_nan=False, description="Share of requests that must meet both."
    )


class NewModel(Body):
    """``POST /admin/v1/models``."""

    name: str = Field(
        pattern=NAME_PATTERN, max_length=MAX_NAME_CHARS, description="How clients name it."
    )
    uri: str = Field(
        min_length=1,
        max_length=2048,
        description="Below an allowed root: `file:///folder`, `s3://bucket/prefix` or `hf://org/name[@revision]`.",
        json_schema_extra={"pattern": "^(file|s3|hf)://"},
    )
    revision: str | None = Field(
        None,
        max_length=200,
        description="Of `hf://`: branch, tag or commit, by default `main`; served as it is at this moment.",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32", "float64"] = Field(
        "auto", description="`auto`: the checkpoint's."
    )
    slo: SloBody
    min_instances: int = Field(0, ge=0, le=1000)
    max_instances: int = Field(1, ge=1, le=1000)
    keep_alive_s: float = Field(
        60.0,
        ge=0,
        le=31_536_000,
        allow_inf_nan=False,
        description="How long an idle instance is kept.",
    )
    pinned: bool = Field(False, description="Never evicted for another model.")
    materialize: Literal["manual", "auto"] = Field(
        "manual",
        description="When its artifacts are built: when an operator asks, or whenever a worker has time.",
    )


class SloChanges(Body):
    """What the model must meet from now on: what is left out stays as it is."""

    ttft_ms: float | None = Field(
        None, gt=0, le=MAX_MS, allow_inf_nan=False, description="Time to first token."
    )
    tpot_ms: float | None = Field(
        None, gt=0, le=MAX_MS, allow_inf_nan=False, description="Time per output token."
    )
    attainment: float | None = Field(
        None, gt=0, le=1, allow_inf_nan=False, description="Share of requests that must meet both."
    )


class ModelChanges(Body):
    """``PATCH /admin/v1/models/{name}``: what is left out stays as it is."""

    slo: SloChanges | None = None
    min_instances: int | None = Field(None, ge=0, le=1000)
    max_instances: int | None = Field(None, ge=1, le=1000)
    keep_alive_s: float | None = Field(None, ge=0, le=31_536_000, allow_inf_nan=False)
    pinned: bool | None = None
