"""Timings of starts to and from their rows: one for each model, device, link and pair of nodes.

A start changes a few of them, and those alone are written.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from pilotlight.common.db.mapping import from_row_json, to_row_json
from pilotlight.common.errors import InternalError
from pilotlight.policy.cluster import DeviceKind
from pilotlight.policy.coldstart.decayed import Mean
from pilotlight.policy.coldstart.timings import OfDevice, OfModel, Timings
from pilotlight.policy.ids import ModelName, NodeId

Key = TypeVar("Key", bound=tuple[str, str])
Rows = Mapping[str, Any]
"""JSON by key."""


def changed_rows(before: Timings, after: Timings) -> Rows:
    """What differs, as rows."""
    return {
        **_changed("model", before.models, after.models),
        **_changed("device", before.devices, after.devices),
        **_changed("rate", before.rates, after.rates),
        **_changed("hop", before.hops, after.hops),
    }


def timings_of(rows: Iterable[tuple[str, Any]]) -> Timings:
    """All that was learned.

    Raises:
        InternalError: a row is none of timings.
    """
    models: dict[tuple[ModelName, DeviceKind], OfModel] = {}
    devices: dict[tuple[NodeId, DeviceKind], OfDevice] = {}
    rates: dict[tuple[NodeId, str], Mean] = {}
    hops: dict[tuple[NodeId, NodeId], Mean] = {}
    for key, body in rows:
        try:
            term, first, second = msgspec.json.decode(key, type=tuple[str, str, str])
        except msgspec.DecodeError as error:
            raise InternalError(f"{key!r} is no key of a timing: {error}") from error
        match term:
            case "model":
                models[ModelName(first), DeviceKind(second)] = from_row_json(body, OfModel)
            case "device":
                devices[NodeId(first), DeviceKind(second)] = from_row_json(body, OfDevice)
            case "rate":
                rates[NodeId(first), second] = from_row_json(body, Mean)
            case "hop":
                hops[NodeId(first), NodeId(second)] = from_row_json(body, Mean)
            case _:
                pass  # Of a later release.
    return Timings(models=models, devices=devices, rates=rates, hops=hops)


def _changed(term: str, old: Mapping[Key, object], new: Mapping[Key, object]) -> Rows:
    return {
        msgspec.json.encode([term, *map(str, key)]).decode(): to_row_json(value)
        for key, value in new.items()
        if value is not old.get(key)
    }
