"""What becomes of a connection to another node."""

from enum import StrEnum


class LinkState(StrEnum):
    """A connection's."""

    CONNECTING = "connecting"
    """For the first time: requests wait for it."""
    UP = "up"
    DOWN = "down"
    """It broke, or could not be made; it is tried again in a while. Requests fail at once."""
    AGAIN = "again"
    """It is tried again. Requests fail all the same: a node that did not answer last time would
    keep them waiting."""
