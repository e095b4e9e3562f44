"""Nothing is wrong: there is no room now."""

from pilotlight.common.errors.base import CapacityError


class TooManyHeld(CapacityError):
    """Too many requests already wait for a model to load."""

    code = "too_many_held"


class QueueFull(CapacityError):
    """The worker's queue is full."""

    code = "queue_full"


class BodiesFull(CapacityError):
    """Bodies of requests fill the memory that is meant for them."""

    code = "bodies_full"
    action = "Try again after the time in Retry-After; raise PILOTLIGHT_BODIES_BYTES if it lasts."


class RateLimited(CapacityError):
    """A limit of the key or of its project is reached."""

    code = "rate_limit_exceeded"
    action = "Try again after the time in Retry-After; `pilotlight key limit` and `project limit` say and set limits."
    openai_type = "requests"


class TokensLimited(RateLimited):
    """The tokens per minute of the key or of its project are used up."""

    openai_type = "tokens"


class NoRoom(CapacityError):
    """No room can be made for the model: everything that is loaded is in use or pinned."""

    code = "no_room"
    action = "Add a worker, unpin a model, or wait until requests in flight have ended."


class HostPoolFull(NoRoom):
    """The host pool has no room for the model, and nothing in it can be dropped."""

    code = "host_pool_full"
    action = "Raise PILOTLIGHT_POOL_BYTES, or wait until leases have ended."


class NoWorker(NoRoom):
    """No live worker can ever hold the model."""

    code = "no_worker"
    action = (
        "See `pilotlight doctor` and /admin/v1/workers; the message says how much memory is needed."
    )
