"""The root of the taxonomy and its families: whose fault it is, and whether a retry can help."""

from typing import ClassVar


class PilotlightError(Exception):
    """Something went wrong."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    action: ClassVar[str] = "Look at the logs with `pilotlight logs`."
    """What the user can do."""
    openai_type: ClassVar[str] = "server_error"

    def __init__(
        self, message: str = "", *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        doc = (type(self).__doc__ or "").strip().splitlines()
        self.message = message or (doc[0] if doc else self.code)
        self.param = param
        self.retry_after_s = retry_after_s
        super().__init__(self.message)


class CallerError(PilotlightError):
    """The request cannot be carried out as it is."""

    code = "invalid_request"
    status = 400
    action = "Correct the request, and send it again."
    openai_type = "invalid_request_error"


class CapacityError(PilotlightError):
    """There is no room at the moment."""

    code = "no_capacity"
    status = 429
    retryable = True
    action = "Try again after the time in Retry-After; add workers if it lasts."
    openai_type = "rate_limit_error"


class TransientError(PilotlightError):
    """Something is unavailable at the moment."""

    code = "unavailable"
    status = 503
    retryable = True
    action = "Try again."


class InternalError(PilotlightError):
    """A bug in Pilotlight."""

    code = "internal"
    action = "Please report it, with the trace id and `pilotlight logs`."
