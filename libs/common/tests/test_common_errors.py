"""The taxonomy: every error says what it is, whether a retry helps, and what the user can do."""

import pytest

from pilotlight.common import errors
from pilotlight.common.errors import (
    CallerError,
    CapacityError,
    InternalError,
    PilotlightError,
    TransientError,
    all_errors,
    error_of,
)

ERRORS = [kind for kind in all_errors() if kind.__module__.startswith("pilotlight.common.errors.")]
"""Those of the taxonomy's own package: other members have a few of their own, which may be loaded
or not."""
BY_NAME = pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)


def test_codes_are_unique() -> None:
    codes = [kind.code for kind in ERRORS if "code" in vars(kind)]
    assert len(codes) == len(set(codes))


@BY_NAME
def test_the_docstring_is_the_default_message(kind: type[PilotlightError]) -> None:
    first_line = (kind.__doc__ or "").strip().splitlines()[0]
    assert first_line
    assert kind().message == str(kind()) == first_line
    assert kind("another").message == "another"


@BY_NAME
def test_the_family_says_the_status(kind: type[PilotlightError]) -> None:
    if issubclass(kind, CallerError):
        assert 400 <= kind.status < 500
        assert not kind.retryable
    elif issubclass(kind, CapacityError):
        assert kind.status == 429
        assert kind.retryable
    elif issubclass(kind, TransientError):
        assert kind.status == 503
        assert kind.retryable
    else:
        assert kind.status == 500
    assert kind.action.endswith(".")


@BY_NAME
def test_the_drawn_tree_names_every_class(kind: type[PilotlightError]) -> None:
    assert kind.__name__ in (errors.__doc__ or "")


@BY_NAME
def test_an_error_is_found_by_its_code(kind: type[PilotlightError]) -> None:
    owner = next(base for base in kind.__mro__ if "code" in vars(base))
    found = error_of(kind.code, "told", 2.0)
    assert type(found) is owner
    assert (found.message, found.retry_after_s) == ("told", 2.0)


def test_an_unknown_code_may_be_tried_again() -> None:
    found = error_of("of_a_later_release", "told")
    assert type(found) is TransientError
    assert not isinstance(found, InternalError)
    assert "of_a_later_release" in found.message


def test_every_error_has_one_import_place() -> None:
    offered = {getattr(errors, name) for name in errors.__all__}
    assert offered == {*ERRORS, all_errors, error_of}
    assert len(errors.__all__) == len(offered)
