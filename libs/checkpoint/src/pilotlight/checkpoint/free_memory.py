"""How much memory there is for a file that is read through the system's: of the machine, or of the
container that it is to us.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
GROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """What the kernel says, in bytes; None: it does not."""

    available_bytes: int | None
    """Of the machine, what files have there among it, since it goes when it is needed."""
    limit_bytes: int | None = None
    """Of our control group."""
    used_bytes: int | None = None
    """Of that, with what files have there."""
    files_bytes: int = 0
    """Of that, what files have there."""
    unused_bytes: int | None = None
    """Of the machine, what nothing has, not even files."""


def free_bytes(facts: MemoryFacts) -> int | None:
    """What a file may take at most without anything but files having to go; None where no limit is
    known.
    """
    group_bytes = None
    if facts.limit_bytes is not None and facts.used_bytes is not None:
        group_bytes = max(0, facts.limit_bytes - facts.used_bytes + facts.files_bytes)
    return min(
        (known for known in (facts.available_bytes, group_bytes) if known is not None), default=None
    )


def untaken_bytes(facts: MemoryFacts) -> int | None:
    """What can be taken and nothing has to go, not even files; None: it is not told."""
    group_bytes = None
    if facts.limit_bytes is not None and facts.used_bytes is not None:
        group_bytes = max(0, facts.limit_bytes - facts.used_bytes)
    return min(
        (known for known in (facts.unused_bytes, group_bytes) if known is not None), default=None
    )


def reads_past(size_bytes: int, memory: MemoryFacts) -> bool:
    """Whether a file is read past the system's memory: it is larger than all that is free there.

    What fits is read faster through it, and is there the next time; what does not fit pushes out
    all other files, itself first.
    """
    free = free_bytes(memory)
    return free is not None and size_bytes > free


def memory_facts(meminfo: Path = MEMINFO, group: Path = GROUP) -> MemoryFacts:
    """What the kernel says now; a tenth of a millisecond."""
    told = {name: kib * 1024 for name, kib in _words(meminfo).items()}
    available_bytes, unused_bytes = told.get("MemAvailable:"), told.get("MemFree:")
    old = group / "memory"
    for limit, used, stat, prefix in (
        (group / "memory.max", group / "memory.current", group / "memory.stat", ""),
        (
            old / "memory.limit_in_bytes",
            old / "memory.usage_in_bytes",
            old / "memory.stat",
            "total_",
        ),
    ):
        if (limit_bytes := _number(limit)) is not None:
            words = _words(stat)
            files_bytes = sum(
                words.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive")
            )
            return MemoryFacts(
                available_bytes, limit_bytes, _number(used), files_bytes, unused_bytes
            )
    return MemoryFacts(available_bytes, unused_bytes=unused_bytes)


def _number(path: Path) -> int | None:
    """What a file of one number says; None where there is none, or no limit."""
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _words(path: Path) -> Mapping[str, int]:
    """Lines of a name, a number, and whatever follows."""
    split = (line.split() for line in _text(path).splitlines())
    return {words[0]: int(words[1]) for words in split if len(words) > 1 and words[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
