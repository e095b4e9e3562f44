"""Device memory that no grant takes, lent to KV: who may have how much, and what changes next.

A grant is what a stage keeps as long as it is held. A loan is KV beside it, out of what is free; it
ends when anything else is granted that memory::

    device  [ grant A | loan A ........ | grant B | loan B ... | kept back ]
            placing counts loans as free: a newcomer's grant goes before them

The cache divides (``divide``), since it knows grants and importance. A worker carries it out
(``next_resize``), and gives a newcomer room by itself, so that no loan is ever waited for longer
than one step of its engine.

A build of an artifact is lent room, too (``lend_build``): of what loans are offered and no request
wants. Loans stay what they are, and their stages have less meanwhile.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pilotlight.policy.ids import InstanceId

LEAST_WEIGHT = 0.01
"""Of a model that nothing asks for: it gets what the others leave, and shares among its like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LendingRules:
    """Figures of both decisions; shares are of the device's memory for models."""

    kept_back_share: float = 0.03
    """Never lent: what activations, graphs and rounding take beside what is declared."""
    slack_share: float = 0.125
    """Loans are not moved between stages for less than this."""
    settle_s: float = 2.0
    """Nor within this time of the last move, unless somebody's grant needs the memory."""
    quiet_share: float = 1 / 64
    """A step of growth that nothing waits for: KV is mapped between two steps of the engine."""
    urgent_share: float = 1 / 8
    """A step of growth that requests wait for."""
    shrink_share: float = 1 / 32
    """A loan that has to shrink gives at least so much back, so that it does not do so again and
    again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Borrower:
    """One stage that KV could be lent to."""

    instance_id: InstanceId
    offered_bytes: int
    """What it may have now."""
    wanted_bytes: int
    """What its requests want beyond its grant."""
    most_bytes: int
    """It cannot use more."""
    weight: float
    """Its importance beside the others' on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loan:
    """KV beyond a stage's grant that it may have until it is told otherwise."""

    instance_id: InstanceId
    num_bytes: int


def divide(
    memory_bytes: int,
    granted_bytes: int,
    borrowers: Sequence[Borrower],
    settled_s: float,
    rules: LendingRules,
) -> tuple[Loan, ...]:
    """What each stage on a device may have beyond its grant.

    1. What is lent is what no grant takes, less what is kept back.
    2. What requests want goes first, in proportion to the weights where it is not enough.
    3. The rest goes to all, in proportion to the weights, as far as each can use it.
    4. Loans stay as they are while they fit, and no stage that wants more would get it, or get
       rid of much: see ``LendingRules.slack_share`` and ``settle_s``.

    Args:
        memory_bytes: the device's, for models.
        granted_bytes: of all grants, those of stages on their way included.
        borrowers: the stages.
        settled_s: since loans on this device last changed.
        rules: figures.
    """
    pool = max(0, memory_bytes - granted_bytes - int(memory_bytes * rules.kept_back_share))  # 1
    weights = [max(one.weight, LEAST_WEIGHT) for one in borrowers]
    wanted = _fill(pool, weights, [min(one.wanted_bytes, one.most_bytes) for one in borrowers])  # 2
    beyond = [one.most_bytes - had for one, had in zip(borrowers, wanted, strict=True)]
    rest = _fill(pool - sum(wanted), weights, beyond)  # 3
    loans = [had + more for had, more in zip(wanted, rest, strict=True)]
    if _stay(pool, memory_bytes, borrowers, loans, settled_s, rules):  # 4
        loans = [one.offered_bytes for one in borrowers]
    return tuple(
        Loan(instance_id=one.instance_id, num_bytes=num_bytes)
        for one, num_bytes in zip(borrowers, loans, strict=True)
    )


def lend_build(
    memory_bytes: int,
    granted_bytes: int,
    borrowers: Sequence[Borrower],
    asked_bytes: int,
) -> int:
    """What a build on a device may have: all that it asks for, or nothing.

    Every grant goes before it, and all that requests want. Nothing is kept back: what its engine
    takes beside the model is in what it asks for.

    Args:
        memory_bytes: the device's, for models.
        granted_bytes: as for ``divide``.
        borrowers: the stages.
        asked_bytes: with what the build's engine keeps for itself.
    """
    wanted_bytes = sum(min(one.wanted_bytes, one.most_bytes) for one in borrowers)
    return asked_bytes if asked_bytes <= memory_bytes - granted_bytes - wanted_bytes else 0


def counted_build(called_bytes: int, taken_bytes: int, free_bytes: int, *, leaves: bool) -> int:
    """What a worker counts of a build where it looks after its loans.

    One that has its room, or is to have it, counts whole: loans shrink for it. One that makes way
    counts until its process has ended, and then no loan grows into it; but none shrinks for it.

    Args:
        called_bytes: that loans are called back for; 0: none yet.
        taken_bytes: that it has.
        free_bytes: of the device, neither granted nor lent.
        leaves: it makes way.
    """
    return min(taken_bytes, max(0, free_bytes)) if leaves else max(called_bytes, taken_bytes)


def _stay(
    pool: int,
    memory_bytes: int,
    borrowers: Sequence[Borrower],
    loans: Sequence[int],
    settled_s: float,
    rules: LendingRules,
) -> bool:
    """Rule 4."""
    fits = sum(one.offered_bytes for one in borrowers) <= pool and all(
        one.offered_bytes <= one.most_bytes for one in borrowers
    )
    if not fits:
        return False
    if settled_s < rules.settle_s and all(one.offered_bytes for one in borrowers):
        return True
    slack = int(memory_bytes * rules.slack_share)
    helped = any(
        one.offered_bytes < min(one.wanted_bytes, loan)
        for one, loan in zip(borrowers, loans, strict=True)
    )
    moved = max(
        (abs(one.offered_bytes - loan) for one, loan in zip(borrowers, loans, strict=True)),
        default=0,
    )
    return moved <= slack and not helped


def _fill(pool: int, weights: Sequence[float], most: Sequence[int]) -> tuple[int, ...]:
    """Shares of a pool in proportion to weights, none above its most: what one leaves, the others
    get.
    """
    shares = [0] * len(weights)
    hungry = {index for index, num_bytes in enumerate(most) if num_bytes > 0}
    while hungry and pool > 0:
        per_weight = pool / sum(weights[index] for index in hungry)
        full = {index for index in hungry if most[index] <= per_weight * weights[index]}
        if not full:
            for index in hungry:
                shares[index] = int(per_weight * weights[index])
            break
        for index in full:
            shares[index] = most[index]
            pool -= most[index]
        hungry -= full
    return tuple(shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class LentStage:
    """A stage with KV on loan, or that may have some, as its worker sees it."""

    instance_id: InstanceId
    granted_bytes: int
    lent_bytes: int
    """What it has beyond the grant; while it grows, what it is about to have."""
    offered_bytes: int
    """What the cache lends it."""
    wanted_bytes: int
    """What its requests want beyond the grant."""
    quiet: bool
    """It may grow though nothing waits: its start is over."""
    starts: bool = False
    """It still loads: it gets what requests want, and no more before its first token."""
    unready_bytes: int = 0
    """As much of what it has gives no room yet: some layers have it, and wait for the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """The next change of one stage's loan."""

    instance_id: InstanceId
    lent_bytes: int
    """Afterwards."""
    grows: bool
    urgent: bool
    """Something waits for it."""
    target_bytes: int = 0
    """Lent when quiet growth is over; 0: this is no step of one."""


def next_resize(
    memory_bytes: int, granted_bytes: int, stages: Sequence[LentStage], rules: LendingRules
) -> Resize | None:
    """What a worker does next about its loans; None: they are as they should be.

    1. Grants and loans are more than the device has: the loan that is furthest above what is wanted
       shrinks, by as much as is missing, in one step.
    2. A loan is above what is offered: it shrinks to that.
    3. Requests want more than a stage has: it grows, in large steps; during its start, by what
       they want.
    4. A stage has less than it is offered, and nothing waits: it grows, in small steps. Where no
       more is to be had, layers that wait for memory share what there is.

    No stage grows into memory that is not free.

    Args:
        memory_bytes: the device's, for models.
        granted_bytes: of all stages that are held, or about to be loaded.
        stages: those that have loans, or may have.
        rules: figures.
    """
    free = memory_bytes - granted_bytes - sum(one.lent_bytes for one in stages)
    least = int(memory_bytes * rules.shrink_share)
    lent = [one for one in stages if one.lent_bytes > 0]
    if free < 0 and lent:  # 1
        largest = max(lent, key=lambda one: (one.lent_bytes - one.wanted_bytes, one.instance_id))
        left = max(0, largest.lent_bytes - max(-free, least))
        return Resize(instance_id=largest.instance_id, lent_bytes=left, grows=False, urgent=True)
    for one in lent:  # 2
        if one.lent_bytes > one.offered_bytes:
            return Resize(
                instance_id=one.instance_id,
                lent_bytes=one.offered_bytes,
                grows=False,
                urgent=False,
            )
    growing = [
        one
        for one in stages
        if one.unready_bytes or (one.lent_bytes < one.offered_bytes and free > 0)
    ]
    for one in growing:  # 3
        room_bytes = one.lent_bytes - one.unready_bytes
        if one.wanted_bytes > room_bytes:
            least = 0 if one.starts else room_bytes + int(memory_bytes * rules.urgent_share)
            wanted = max(one.wanted_bytes, one.lent_bytes, least)
            most = min(one.offered_bytes, one.lent_bytes + free)
            return Resize(
                instance_id=one.instance_id,
                lent_bytes=min(wanted, most),
                grows=True,
                urgent=True,
            )
    step = int(memory_bytes * rules.quiet_share)
    for one in growing:  # 4
        most = max(0, min(one.offered_bytes - one.lent_bytes, free))
        if one.quiet and (most or one.unready_bytes):
            return Resize(
                instance_id=one.instance_id,
                lent_bytes=one.lent_bytes + min(step, most),
                grows=True,
                urgent=False,
                target_bytes=one.lent_bytes + most,
            )
    return None
