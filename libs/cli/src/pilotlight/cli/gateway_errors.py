"""A gateway's errors as those of the taxonomy."""

from pilotlight.common.errors import PilotlightError, error_of


def gateway_error(code: str, message: str) -> PilotlightError:
    """The error that a gateway tells.

    On ``/v1`` its message ends with what to do, which commands say by themselves.
    """
    error = error_of(code, message)
    advice = f". {error.action}"
    if not message.endswith(advice):
        return error
    return error_of(code, message.removesuffix(advice))
