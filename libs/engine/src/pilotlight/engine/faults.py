"""Which errors end more than what was asked for: after some, a process can do nothing more on its
device.

No torch here.
"""

from collections.abc import Iterator

OUT_OF_MEMORY = 2
DEVICE_CODES = frozenset({46, 100, 214, 220, 226, 802, 999})
"""Of the CUDA driver: the device is not there, has an error of its memory or links, or something
unknown."""
CONTEXT_CODES = frozenset({700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721})
"""Of the CUDA driver: a kernel went wrong (an illegal address, instruction or stack, an assertion,
a launch that timed out or failed). The context is lost; whatever is asked in it afterwards gives
the same error."""
_WORDS = (
    "illegal memory access",
    "unspecified launch failure",
    "device-side assert",
    "misaligned address",
    "illegal instruction",
)
"""Of CUDA's messages: some errors come as text alone."""


def context_lost(error: BaseException) -> bool:
    """Whether the process's context on its device is gone with this error, or one that led to
    it.
    """
    return any(_code(one) in CONTEXT_CODES | DEVICE_CODES or _said(one) for one in _chain(error))


def out_of_memory(error: BaseException) -> bool:
    """Whether the device had no memory for what was asked; its context is as it was."""
    return not context_lost(error) and any(
        type(one).__name__ == "OutOfMemoryError"
        or _code(one) == OUT_OF_MEMORY
        or "CUBLAS_STATUS_ALLOC_FAILED" in str(one)
        for one in _chain(error)
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def _code(error: BaseException) -> int | None:
    """As torch names it (``AcceleratorError.error_code``), or libs/native
    (``NativeError.code``).
    """
    for name in ("error_code", "code"):
        value = getattr(error, name, None)
        if isinstance(value, int):
            return value
    return None


def _said(error: BaseException) -> bool:
    text = str(error)
    return (
        isinstance(error, RuntimeError)
        and "CUDA" in text
        and any(words in text for words in _WORDS)
    )
