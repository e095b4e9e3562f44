"""What every eviction policy is asked and answers, and the rules that none of them may break.

A candidate is one copy in one tier: an instance's stage on a device, or a model's copy in a host
pool. Both are chosen by the same policies. ``eviction.candidates`` makes them from what is known.
"""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol, runtime_checkable

from pilotlight.policy.arrivals import Access
from pilotlight.policy.cluster import Tier
from pilotlight.policy.ids import Digest, ModelName, NodeId

SPARED_SHOWN = 3
"""Of the copies that stay, those that would have gone next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionCandidate:
    """One copy that takes room where room is needed."""

    subject: str
    """What the holder calls it: an instance id on a device, a digest in a host pool."""
    model: ModelName
    digest: Digest
    tier: Tier
    node_id: NodeId
    size_bytes: int
    resident_since_s: float
    last_used_s: float
    in_flight: int = 0
    """Requests that run on it now."""
    leases: int = 0
    """Readers that hold it open: loads under way."""
    pinned: bool = False
    busy: bool = False
    """It is being loaded or drained: its holder decides over it, not the cache."""
    penalty_s: float = 0.0
    """What it costs to bring it back to this tier, from where it would come: P of mCache, eq. (1).
    """
    arrivals_per_s: float = 0.0
    """How often its model is asked for: 1/T of mCache, eq. (1)."""

    @property
    def loss(self) -> float:
        """What it costs to be without it: seconds that requests wait, for each second.

        P/T of mCache, eq. (1). The utility there is this for each byte; a choice among sets that
        free enough adds up losses, and has the sizes beside them.
        """
        return self.penalty_s * self.arrivals_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomRequest:
    """Room that is asked for in one place: one device, or one host pool."""

    need_bytes: int
    free_bytes: int
    now_s: float
    protected: frozenset[str] = frozenset()
    """Subjects that must stay, whatever they are worth: the model that the room is for, a source of
    its bytes."""

    @property
    def missing_bytes(self) -> int:
        """Bytes that must be freed; 0 when there is room already."""
        return max(0, self.need_bytes - self.free_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionRules:
    """What holds for every policy."""

    min_residency_s: float = 1.0
    """A copy younger than this stays: what has just been loaded has not had its chance to be used.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """One copy that goes, and what was known of it when it was chosen."""

    subject: str
    model: ModelName
    size_bytes: int
    idle_s: float
    """Since it was last used."""
    penalty_s: float
    arrivals_per_s: float
    loss: float
    """As ``EvictionCandidate.loss``, as are the two before."""
    reason: str
    score: float | None = None
    """What the policy orders by (``Scoring``); None: it has queues."""
    spared: tuple["Spared", ...] = ()
    """What would have gone next, where that is known."""


@dataclass(frozen=True, slots=True)
class Spared:
    """One copy that could have gone and was worth more."""

    model: ModelName
    size_bytes: int
    loss: float
    score: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One copy that stays, and why."""

    subject: str
    reason: str
    model: ModelName = ModelName("")
    size_bytes: int = 0
    pin_alone: bool = False
    """Nothing but its pin keeps it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionPlan:
    """The answer: with every victim gone, the room is there.

    Without enough victims there are none at all.
    """

    enough: bool
    victims: tuple[Victim, ...] = ()
    kept: tuple[Kept, ...] = ()
    freed_bytes: int = 0
    loss: float = 0.0
    """Of all victims: what the room costs. Plans for other places can be compared by it."""
    reason: str = ""
    """In a sentence: why nothing need go, what goes, or why no room can be made."""
    unpin: tuple[ModelName, ...] = ()
    """Where pins alone stand in the way: the fewest models that would have to be unpinned."""


class EvictionPolicy(Protocol):
    """Orders what may go. It keeps what it has been told; one task or loop owns it.

    The same object serves a simulator, which tells it of every event and takes victims from
    ``ranked``, and a service, whose candidates are rebuilt from reports for each question and come
    with it (``ordered``).
    """

    @property
    def name(self) -> str:
        """As settings and records call it."""
        ...

    def on_access(self, access: Access) -> None:
        """A model was asked for, cached or not. On a miss this comes before room is made."""
        ...

    def on_insert(self, candidate: EvictionCandidate, now_s: float) -> None:
        """A copy is resident now, or is there with other figures (size, penalty) than before."""
        ...

    def on_evict(self, subject: str, now_s: float) -> None:
        """A resident copy has gone, by this policy's choice or not."""
        ...

    def ranked(self, now_s: float) -> Generator[str, None, None]:
        """Subjects of resident copies, the least worth first.

        It may be left at any point, and must be closed before the policy is told of anything.
        """
        ...

    def ordered(
        self, candidates: Sequence[EvictionCandidate], now_s: float
    ) -> Sequence[EvictionCandidate]:
        """The same copies, the least worth first, whether they were told of before or not."""
        ...

    def expired(self, now_s: float) -> Sequence[str]:
        """Subjects of resident copies that go though no room is needed."""
        ...


@runtime_checkable
class Scoring(Protocol):
    """A policy that has a number for each copy; the least goes first."""

    def stated(self, candidate: EvictionCandidate, now_s: float) -> float:
        """What a copy that comes with a question is worth, as ``ordered`` orders it."""
        ...


def why_kept(
    candidate: EvictionCandidate, request: RoomRequest, rules: EvictionRules
) -> str | None:
    """Why no policy may evict the candidate; None when it may go.

    1. requests are in flight on it
    2. its model is pinned
    3. it is under a lease
    4. it is being loaded or drained
    5. it is younger than the minimum residency
    6. the request protects it
    """
    if candidate.in_flight > 0:  # 1
        return f"{candidate.in_flight} requests are in flight"
    if candidate.pinned:  # 2
        return "its model is pinned"
    if candidate.leases > 0:  # 3
        return f"it is under {candidate.leases} leases"
    if candidate.busy:  # 4
        return "it is being loaded or drained"
    age_s = request.now_s - candidate.resident_since_s
    if age_s < rules.min_residency_s:  # 5
        return f"it is {age_s:.1f} s old, less than the minimum residency of {rules.min_residency_s:g} s"
    if candidate.subject in request.protected:  # 6
        return "the request protects it"
    return None


def plan_eviction(
    policy: EvictionPolicy,
    request: RoomRequest,
    candidates: Iterable[EvictionCandidate],
    rules: EvictionRules,
) -> EvictionPlan:
    """Choose victims among copies that come with the question, until the room is there.

    1. leave out what no policy may evict, with the reason
    2. the policy orders the rest
    3. take them in order until the room is there

    Args:
        policy: It orders.
        request: The room that is needed, and what is free.
        candidates: What takes room in that place.
        rules: What may stay whatever the policy says.
    """
    kept: list[Kept] = []
    free_to_go: list[EvictionCandidate] = []
    for candidate in candidates:  # 1
        reason = why_kept(candidate, request, rules)
        if reason is None:
            free_to_go.append(candidate)
        else:
            kept.append(_kept(candidate, reason, request, rules))
    ordered = policy.ordered(free_to_go, request.now_s)  # 2
    plan = plan_in_order(request, ordered, kept, policy.name)  # 3
    return _explained(plan, ordered, policy, request.now_s)


def plan_resident(
    policy: EvictionPolicy,
    request: RoomRequest,
    resident: Mapping[str, EvictionCandidate],
    rules: EvictionRules,
) -> EvictionPlan:
    """The same for a place of whose copies the policy was told one by one: only as many are looked
    at as are needed.

    Args:
        policy: Told of every copy in ``resident``.
        request: The room that is needed, and what is free.
        resident: Copies in that place, by subject.
        rules: What may stay whatever the policy says.
    """
    kept: list[Kept] = []

    with closing(policy.ranked(request.now_s)) as subjects:

        def may_go() -> Iterator[EvictionCandidate]:
            for subject in subjects:
                candidate = resident[subject]
                reason = why_kept(candidate, request, rules)
                if reason is None:
                    yield candidate
                else:
                    kept.append(_kept(candidate, reason, request, rules))

        return plan_in_order(request, may_go(), kept, policy.name)


def plan_in_order(
    request: RoomRequest, ordered: Iterable[EvictionCandidate], kept: Iterable[Kept], policy: str
) -> EvictionPlan:
    """Take candidates, the least worth first, until the room is there; then spare those that turned
    out not to be needed.

    1. there is room already: nothing goes
    2. take candidates in order until the missing bytes are freed
    3. all together do not free enough: none goes, with the reason, and what would have to be
       unpinned where that is all
    4. a later, larger victim may make earlier ones needless: spare what can be spared, the most
       worth first

    Args:
        request: the room that is needed, and what is free.
        ordered: candidates that may go, the least worth first.
        kept: candidates that may not, with the reason: they come back in the plan. It may grow
            while ``ordered`` is taken.
        policy: the name of the policy that ordered them, for reasons.
    """
    missing_bytes = request.missing_bytes
    if missing_bytes == 0:  # 1
        return EvictionPlan(enough=True, reason="there is room already")
    chosen: list[EvictionCandidate] = []
    freed_bytes = 0
    for candidate in ordered:  # 2
        if freed_bytes >= missing_bytes:
            break
        chosen.append(candidate)
        freed_bytes += candidate.size_bytes
    stay = tuple(kept)
    if freed_bytes < missing_bytes:  # 3
        unpin = _to_unpin(stay, missing_bytes - freed_bytes)
        advice = f"; unpin {', '.join(unpin)} to make it" if unpin else ""
        return EvictionPlan(
            enough=False,
            kept=stay,
            reason=f"{missing_bytes} bytes are missing, {freed_bytes} could be freed, {len(stay)} copies may not go{advice}",
            unpin=unpin,
        )
    for candidate in reversed(chosen.copy()):  # 4
        if freed_bytes - candidate.size_bytes >= missing_bytes:
            chosen.remove(candidate)
            freed_bytes -= candidate.size_bytes
    victims = tuple(_victim(one, request.now_s, policy) for one in chosen)
    return EvictionPlan(
        enough=True,
        victims=victims,
        kept=stay,
        freed_bytes=freed_bytes,
        loss=sum(one.loss for one in victims),
        reason=f"{len(victims)} copies make room for {missing_bytes} bytes",
    )


def _explained(
    plan: EvictionPlan, ordered: Sequence[EvictionCandidate], policy: EvictionPolicy, now_s: float
) -> EvictionPlan:
    """With scores, and what would have gone next."""

    def score(one: EvictionCandidate) -> float | None:
        return policy.stated(one, now_s) if isinstance(policy, Scoring) else None

    gone = {one.subject for one in plan.victims}
    scores = {one.subject: score(one) for one in ordered if one.subject in gone}
    stay = islice((one for one in ordered if one.subject not in gone), SPARED_SHOWN if gone else 0)
    spared = tuple(Spared(one.model, one.size_bytes, one.loss, score(one)) for one in stay)
    victims = (replace(one, spared=spared, score=scores[one.subject]) for one in plan.victims)
    return replace(plan, victims=tuple(victims))


def _kept(
    candidate: EvictionCandidate, reason: str, request: RoomRequest, rules: EvictionRules
) -> Kept:
    pin_alone = (
        candidate.pinned and why_kept(replace(candidate, pinned=False), request, rules) is None
    )
    return Kept(
        subject=candidate.subject,
        reason=reason,
        model=candidate.model,
        size_bytes=candidate.size_bytes,
        pin_alone=pin_alone,
    )


def _to_unpin(kept: Iterable[Kept], missing_bytes: int) -> tuple[ModelName, ...]:
    """The fewest pinned models whose copies free so much; none where all of them do not."""
    pinned: dict[ModelName, int] = {}
    for one in kept:
        if one.pin_alone:
            pinned[one.model] = pinned.get(one.model, 0) + one.size_bytes
    chosen: list[ModelName] = []
    for model, size_bytes in sorted(pinned.items(), key=lambda each: (-each[1], each[0])):
        if missing_bytes <= 0:
            break
        chosen.append(model)
        missing_bytes -= size_bytes
    return tuple(chosen) if missing_bytes <= 0 else ()


def _victim(candidate: EvictionCandidate, now_s: float, policy: str) -> Victim:
    idle_s = now_s - candidate.last_used_s
    return Victim(
        subject=candidate.subject,
        model=candidate.model,
        size_bytes=candidate.size_bytes,
        idle_s=idle_s,
        penalty_s=candidate.penalty_s,
        arrivals_per_s=candidate.arrivals_per_s,
        loss=candidate.loss,
        reason=f"{policy}: unused for {idle_s:.1f} s, asked for {candidate.arrivals_per_s:.3g} times"
        f" a second, {candidate.penalty_s:.3g} s to bring back",
    )
