"""The taxonomy as a table: every error, and the one of a code."""

from pilotlight.common.errors.base import PilotlightError, TransientError


def all_errors() -> tuple[type[PilotlightError], ...]:
    """Every class of the taxonomy, the root first."""
    found: list[type[PilotlightError]] = []
    stack: list[type[PilotlightError]] = [PilotlightError]
    while stack:
        current = stack.pop()
        found.append(current)
        stack.extend(current.__subclasses__())
    return tuple(found)


def error_of(code: str, message: str, retry_after_s: float | None = None) -> PilotlightError:
    """The error that a peer reported by code; an unknown code becomes ``TransientError``."""
    for kind in all_errors():
        if kind.code == code and "code" in vars(kind):
            return kind(message, retry_after_s=retry_after_s)
    return TransientError(f"{code}: {message}", retry_after_s=retry_after_s)
