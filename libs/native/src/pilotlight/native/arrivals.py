"""Waiting for what a device writes into the host's memory, without asking the driver, which answers
nobody while it loads a kernel or makes a graph for another thread.
"""

from pilotlight.native.library import TIMED_OUT, library


def await_words(address: int, count: int, absent: int, patience_s: float) -> bool:
    """Waits, on a core of its own, until each of some words is another one than before.

    Args:
        address: of the words, int32, which only the device writes meanwhile.
        count: of words.
        absent: what the caller has written to each; nothing that the device writes.
        patience_s: for so long, in seconds.

    Returns:
        Whether they came in time.

    Raises:
        NativeUnavailable: there is no library.
    """
    return library().get("await_words", address, count, absent, patience_s) != TIMED_OUT
