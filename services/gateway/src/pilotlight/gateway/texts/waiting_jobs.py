"""Jobs that wait for a text helper, counted, with the bundles that they bring."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from pilotlight.gateway.texts.frames import Give, Reply, encoded, header
from pilotlight.policy.ids import Digest
from pilotlight.policy.lanes import LaneJob, LaneLoad

Group = tuple[str, str, bool]
"""Owner, model, and whether they are long: jobs that are alike to the policy but for their order.
"""


@dataclass(slots=True, kw_only=True)
class TextJob:
    """A job that waits or runs."""

    lane: LaneJob
    kind: str
    data: bytes
    give: Give | None
    cpu_s: float
    give_cpu_s: float
    """For loading the bundle."""
    came_s: float
    answer: "asyncio.Future[Reply]"
    alone: bool = False
    """A helper was lost that had it with others."""

    @property
    def single(self) -> bool:
        """It is handed over by itself."""
        return self.alone or self.lane.long or self.give is not None

    @property
    def group(self) -> Group:
        """What it is to the policy."""
        return self.lane.owner, self.lane.model, self.lane.long

    def lose(self, error: Exception) -> None:
        """There will be no answer, unless there is one."""
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # Looked at: the caller may have left.

    def frames(self, *, held: bool) -> list[bytes]:
        """What a helper is sent, which may hold the bundle already: another job has brought it."""
        frames: list[bytes] = []
        if self.give is not None and not held:
            given = encoded(self.give)
            frames += [header(given, self.give_cpu_s), given]
        return [*frames, header(self.data, self.cpu_s), self.data]


class WaitingJobs:
    """All of them, by group and in order of arrival: the policy sees a group's first or last alone,
    so that a job costs the same however many wait.
    """

    def __init__(self) -> None:
        # Ordered ones: to look at the first of a dict takes as long as it had others before.
        self._groups: dict[Group, OrderedDict[int, TextJob]] = {}
        self._group_of: dict[int, Group] = {}
        # No ``Counter``, whose missing and deleted keys are Python.
        self._jobs: dict[str, int] = {}
        self._bytes: dict[str, int] = {}
        """Both by owner; a bundle is nobody's."""
        self._all_bytes = 0
        self._gives: dict[Digest, Give] = {}
        """Bundles that jobs wait with: all that bring the same one share its bytes."""
        self._given: Counter[Digest] = Counter()
        """How many jobs bring it."""

    def __len__(self) -> int:
        return len(self._group_of)

    def __contains__(self, number: int) -> bool:
        return number in self._group_of

    def __iter__(self) -> Iterator[TextJob]:
        return (job for group in self._groups.values() for job in group.values())

    @property
    def bytes(self) -> int:
        """Of jobs, and of the bundles that they bring, each once."""
        return self._all_bytes

    def heads(self) -> list[LaneJob]:
        """Those that may be next: the first of each group."""
        return [next(iter(group.values())).lane for group in self._groups.values()]

    def latest_of(self, owner: str) -> list[LaneJob]:
        """The last of each of an owner's groups."""
        if not self._groups:
            return []
        return [
            next(reversed(jobs.values())).lane
            for group, jobs in self._groups.items()
            if group[0] == owner
        ]

    def load(self, owner: str) -> LaneLoad:
        """What waits, as an owner's next job finds it."""
        return LaneLoad(
            jobs=len(self),
            bytes=self._all_bytes,
            own_jobs=self._jobs.get(owner, 0),
            own_bytes=self._bytes.get(owner, 0),
        )

    def ahead_of_new(self, owner: str) -> int:
        """How many go before one more of an owner's: its own, and as many of each other's, since
        owners take turns.
        """
        own = self._jobs.get(owner, 0)
        return own + sum(min(jobs, own + 1) for other, jobs in self._jobs.items() if other != owner)

    def shared(self, give: Give) -> Give:
        """The same bundle, as another job brings it: read twice, it may stand twice in memory."""
        return self._gives.get(give.digest, give)

    def size_bytes(self, job: TextJob) -> int:
        """What it would add."""
        if job.give is None:
            return len(job.data)
        new = job.give.digest not in self._gives
        return len(job.data) + (len(job.give.bundle) if new else 0)

    def add(self, job: TextJob) -> None:
        """It waits."""
        number, owner, key = job.lane.number, job.lane.owner, job.group
        self._all_bytes += self.size_bytes(job)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = OrderedDict()
        group[number] = job
        self._group_of[number] = key
        self._jobs[owner] = self._jobs.get(owner, 0) + 1
        self._bytes[owner] = self._bytes.get(owner, 0) + len(job.data)
        if job.give is not None:
            self._gives[job.give.digest] = job.give
            self._given[job.give.digest] += 1

    def alike(self, first: LaneJob, most: int, most_bytes: int) -> list[TextJob]:
        """The first job of a group, and those behind it, as far as they may go with it."""
        group = self._groups[self._group_of[first.number]]
        jobs: list[TextJob] = []
        room_bytes = most_bytes
        for job in islice(group.values(), most):
            room_bytes -= len(job.data)
            if jobs and (job.single or room_bytes < 0):
                break
            jobs.append(job)
            if job.single:
                break
        return jobs

    def fills(self, jobs: list[TextJob], most: int) -> bool:
        """Whether no more may go with these, which wait: waiting longer gives nothing."""
        first = jobs[0]
        return len(jobs) == most or first.single or len(jobs) < len(self._groups[first.group])

    def pop(self, number: int) -> TextJob | None:
        """It waits no more; None when it did not."""
        key = self._group_of.pop(number, None)
        if key is None:
            return None
        group = self._groups[key]
        job = group.pop(number)
        if not group:
            del self._groups[key]
        owner = job.lane.owner
        if self._jobs[owner] == 1:
            del self._jobs[owner], self._bytes[owner]
        else:
            self._jobs[owner] -= 1
            self._bytes[owner] -= len(job.data)
        self._all_bytes -= len(job.data)
        if job.give is not None:
            self._given[job.give.digest] -= 1
            if not self._given[job.give.digest]:
                del self._given[job.give.digest], self._gives[job.give.digest]
                self._all_bytes -= len(job.give.bundle)
        return job
