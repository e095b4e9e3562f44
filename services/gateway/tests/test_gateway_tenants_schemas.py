"""The document of the admin API says what is taken of a new key: no more, and no less."""

from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pilotlight.common.errors import UnprocessableInput
from pilotlight.gateway.tenants.schemas import KeyLimits, NewKey, ProjectLimits, Rotation

SCHEMA = jsonschema.Draft202012Validator(NewKey.model_json_schema())
bodies = st.fixed_dictionaries(
    {"label": st.sampled_from(["a", "bootstrap", "", "a b"])},
    optional={
        "role": st.sampled_from(["inference", "admin", "other", None]),
        "project": st.sampled_from(["default/default", "a/b", "a"]),
        "models": st.lists(st.sampled_from(["a", "a*", "a*b"]), max_size=2),
        "routes": st.lists(st.sampled_from(["/v1/chat", "v1"]), max_size=2),
        "admin_role": st.sampled_from(["viewer", "owner", "none", None]),
        "expires_at": st.sampled_from(["2030-01-01T00:00:00Z", None]),
        "wrong": st.just(1),
    },
)


def taken(body: dict[str, Any]) -> bool:
    try:
        NewKey.model_validate(body).check()
    except (ValidationError, UnprocessableInput):
        return False
    return True


@given(bodies)
def test_the_schema_of_a_new_key_is_what_is_taken(body: dict[str, Any]) -> None:
    assert SCHEMA.is_valid(body) == taken(body)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Rotation, {"overlap_s": False}),
        (Rotation, {"overlap_s": "1"}),
        (KeyLimits, {"requests_per_minute": True}),
        (KeyLimits, {"tokens_per_minute": "60"}),
        (ProjectLimits, {"weight": "2"}),
    ],
)
def test_what_is_no_number_is_none(kind: type[Any], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        kind.model_validate(body)
