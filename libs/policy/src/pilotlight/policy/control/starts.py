"""Where each start goes, and what comes of refusals."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Protocol

from pilotlight.policy.control.books import Books, Record
from pilotlight.policy.control.line import may_try
from pilotlight.policy.control.plan import (
    NO_ROOM,
    Backing,
    ControlFacts,
    ControlRules,
    Memory,
    Refusal,
    RefusedStart,
    StartOrder,
)
from pilotlight.policy.ids import (
    DecisionId,
    Generation,
    InstanceId,
    ModelName,
    WorkerId,
)
from pilotlight.policy.model import Model
from pilotlight.policy.parallelism import SchemeChoice
from pilotlight.policy.plan import Instance, InstanceState, Snapshot
from pilotlight.policy.request import Demand
from pilotlight.policy.scaling import Start
from pilotlight.policy.turns import Turn

NO_WORKER = "no_worker"
"""Code of the taxonomy (``common.errors``)."""
AHEAD = "ahead"
"""Of a start ahead of requests, which found no free room."""


Chosen = tuple[Snapshot, SchemeChoice]
"""What a choice was made from, and the choice."""


class Choose(Protocol):
    """Where one start goes."""

    def __call__(
        self,
        model: Model,
        excluded: frozenset[WorkerId],
        demand: tuple[Demand, ...],
        *,
        explained: bool,
        ahead: bool,
        instances: int,
    ) -> Chosen:
        """Choose.

        Args:
            model: To be started.
            excluded: Workers that may not be chosen.
            demand: Of all models.
            explained: Also where there is no scheme, with workers that say why.
            ahead: In free room alone.
            instances: How many more the model is to have: of its first group they are some.
        """
        ...


class Drafted(Protocol):
    """The world while a tick changes it."""

    books: Books

    def put(self, *records: Record) -> None:
        """Take records in; what follows in this tick counts them."""


class Tries:
    """Starts: where each goes, and what comes of refusals.

    1. a start of the model is asking for room already: it is waited for
    2. its attempt was refused everywhere, or no cache could grant: it waits, the longer the more
       attempts were refused
    3. while it waits, only a change of the workers ends that early
    4. some worker may take it: room is asked for there, leaving out those that refused in this
       attempt
    5. none may: the attempt is refused
    6. a start ahead of requests is not tried elsewhere, and a refusal of it is no news: it waits.
       Requests that come do not wait for that
    7. a burst's further instances come after every model has had its turn, as far as there is room;
       what is left of them waits for the first ones. A group that is to become several instances
       is as many of them
    8. no more than a few begin in one tick, the first of the line: the leader has a lease to renew
       and commands to give, however many models are asked for at once. The rest is looked at again
       in the next tick, which those that began bring about
    """

    def __init__(
        self,
        facts: ControlFacts,
        memory: Memory,
        rules: ControlRules,
        is_wanted: Callable[[ModelName], bool],
        choose: Choose,
    ) -> None:
        self._facts = facts
        self._rules = rules
        self._choose = choose
        self.orders: list[StartOrder] = []
        self.refused: list[RefusedStart] = []
        self.looked_at = 0
        """Workers that were compared."""
        self._begun: set[InstanceId] = set()
        """Names in the draft of what this tick starts."""
        # Refusals of models without demand count no longer.
        over = set(facts.started)
        self.backing = {
            model: one
            for model, one in memory.backing.items()
            if model not in over and is_wanted(model)
        }
        self.tries = {
            model: one
            for model, one in memory.tries.items()
            if model not in over and is_wanted(model)
        }
        for refusal in facts.refusals:
            if is_wanted(refusal.model):
                self.tries[refusal.model] = (*self.tries.get(refusal.model, ()), refusal)

    def take(
        self,
        turns: Iterable[Turn],
        starts: Iterable[Start],
        draft: Drafted,
        demand: tuple[Demand, ...],
        wanted: Mapping[ModelName, str],
    ) -> None:
        """Take up the turns of all models.

        Args:
            turns: In their order.
            starts: What is to start; several of one model in a burst.
            draft: The world, with what this tick has decided so far.
            demand: What waits at gateways.
            wanted: Why models are wanted, by name; others for the reason of their start.
        """
        each = defaultdict[ModelName, list[Start]](list)
        for start in starts:
            each[start.model].append(start)
        begun: list[tuple[Turn, int]] = []
        for turn in turns:
            if self._is_full:
                break
            count = len(each[turn.model])
            made = self._begin(each[turn.model][0], turn.left, draft, demand, wanted, count)
            if made:
                begun.append((turn, made))
        for turn, made in begun:  # 7
            starts_of = each[turn.model]
            more, so_far = made, made
            while more and so_far < len(starts_of):
                further, count = starts_of[so_far], len(starts_of) - so_far
                more = (
                    0
                    if self._is_full
                    else self._begin(further, turn.left, draft, demand, wanted, count)
                )
                so_far += more

    @property
    def _is_full(self) -> bool:
        """Rule 8."""
        return len(self.orders) >= self._facts.most_starts(self._rules)

    def _begin(
        self,
        start: Start,
        left: frozenset[WorkerId],
        draft: Drafted,
        demand: tuple[Demand, ...],
        wanted: Mapping[ModelName, str],
        instances: int,
    ) -> int:
        """Take up one start; how many instances it becomes, 0 where it was given no place.

        Args:
            start: The model, and why it is to start.
            left: Workers whose room is kept for others.
            draft: The world, with what this tick has decided so far.
            demand: What waits at gateways.
            wanted: Why models are wanted, by name; others for the reason of ``start``.
            instances: How many of these starts there are to be.
        """
        model = self._facts.models.get(start.model)
        if model is None:
            return 0
        ours = draft.books.by_model.get(model.name, ())
        if any(draft.books.records[one].tentative for one in ours if one not in self._begun):  # 1
            return 0
        tried = self.tries.get(model.name, ())
        if not tried and not self._may_try(start):  # 3
            return 0
        reason = (
            start.reason
            if model.name in self._facts.awaited
            else wanted.get(model.name, start.reason)
        )
        excluded = left.union(one.worker_id for one in tried)
        choose = partial(
            self._choose, model, excluded, demand, ahead=start.ahead, instances=instances
        )
        seen, choice = choose(explained=False)
        self.looked_at += len(seen.workers)
        over = len(tried) >= self._rules.max_tries or any(one.transient for one in tried)
        if choice.scheme is None and not self._begun.isdisjoint(ours):  # 7
            return 0
        if start.ahead and (choice.scheme is None or tried):  # 6
            self.tries.pop(model.name, None)
            self._back_off(model.name, AHEAD)
            return 0
        if choice.scheme is None or over:  # 2, 5
            self.tries.pop(model.name, None)
            self._refuse(model.name, reason, tried, (seen, choice), choose)
            return 0
        trace = next((one.trace_parent for one in demand if one.model == model.name), "")
        seen_s = self._facts.demand_seen_s.get(model.name, self._facts.now_s)
        self.orders.append(
            StartOrder(
                model=model,
                reason=reason,
                choice=choice,
                seen=seen,
                demand_seen_s=seen_s,
                trace_parent=trace,
                ahead=start.ahead,
            )
        )
        # What follows in this tick counts it; the books that are kept get it from the start that
        # asks for its room.
        tentative = _tentative(model, choice, self._facts, reason, len(self.orders))
        self._begun.add(tentative.instance.instance_id)
        draft.put(tentative)
        return choice.instances

    def _may_try(self, start: Start) -> bool:
        waits = self.backing.get(start.model)
        if waits is not None and waits.code == AHEAD and not start.ahead:  # 6
            del self.backing[start.model]
            return True
        return may_try(waits, self._facts, self._rules)

    def _refuse(
        self,
        model: ModelName,
        reason: str,
        tried: tuple[Refusal, ...],
        found: Chosen,
        choose: Callable[..., Chosen],
    ) -> None:
        """Say why nothing is started, and wait before the next attempt.

        Args:
            model: That is not started.
            reason: Why it was to be.
            tried: Refusals of this attempt.
            found: What came of the search.
            choose: Searches again, and explains.
        """
        seen, choice = found
        if tried:
            code, message = tried[-1].code, tried[-1].message
        else:
            code, message = NO_WORKER if choice.no_worker_ever else NO_ROOM, choice.reason
        # Byte counts and ages differ from attempt to attempt; a refusal is a new one by what
        # refused, and how.
        essence = f"{code} {sorted((one.worker_id, one.code) for one in tried)}"
        before = self.backing.get(model)
        recorded = before.recorded if before is not None else frozenset[str]()
        recorded_s = before.recorded_s if before is not None else self._facts.now_s
        record = (
            essence not in recorded or self._facts.now_s - recorded_s >= self._rules.refusal_again_s
        )
        self._back_off(
            model, code, recorded | {essence}, self._facts.now_s if record else recorded_s
        )
        if record:
            seen, choice = choose(explained=True)
            self.looked_at += len(seen.workers)
        reasons = [
            reason,
            choice.reason,
            *(f"{one.worker_id}: {one.reason}" for one in choice.rejected),
        ]
        reasons += [f"{one.worker_id}: {one.code}: {one.message}" for one in tried]
        self.refused.append(
            RefusedStart(
                model=model,
                code=code,
                message=message,
                reasons=tuple(reasons),
                seen=seen,
                record=record,
                never_fits=not tried and choice.never_fits,
            )
        )

    def _back_off(
        self,
        model: ModelName,
        code: str,
        recorded: frozenset[str] = frozenset(),
        recorded_s: float = 0.0,
    ) -> None:
        """Wait before the next attempt.

        Args:
            model: Which was refused.
            code: How.
            recorded: Refusals that were written down.
            recorded_s: When the last of them was.
        """
        before, now_s = self.backing.get(model), self._facts.now_s
        attempts = before.attempts + 1 if before is not None else 1
        self.backing[model] = Backing(
            attempts=attempts,
            at_s=now_s,
            retry_at_s=now_s + retry_pause_s(model, attempts, self._rules),
            world_version=self._facts.world_version,
            code=code,
            recorded=recorded,
            recorded_s=recorded_s,
        )


def retry_pause_s(model: ModelName, attempts: int, rules: ControlRules) -> float:
    """The pause after a number of refusals, at least 1: exponential, with jitter that follows from
    the model's name, so that a log can be replayed.
    """
    ceiling_s = min(rules.retry_limit_s, rules.retry_first_s * 2.0 ** min(attempts - 1, 32))
    drawn = hashlib.blake2b(f"{model} {attempts}".encode(), digest_size=8).digest()
    return ceiling_s * (0.5 + 0.5 * int.from_bytes(drawn) / 2**64)


def _tentative(
    model: Model, choice: SchemeChoice, facts: ControlFacts, reason: str, number: int
) -> Record:
    """A start in the draft of this tick.

    Args:
        model: Which starts.
        choice: Where.
        facts: Of the tick.
        reason: Why.
        number: Of the start in this tick.
    """
    assert choice.scheme is not None
    instance = Instance(
        instance_id=InstanceId(f"start {number} of {model.name}"),
        model=model.name,
        digest=model.digest,
        state=InstanceState.PLANNED,
        generation=Generation(1),
        epoch=facts.term.epoch,
        placements=choice.scheme.placements,
        decision_id=DecisionId(""),
        state_since_s=facts.now_s,
        last_used_s=facts.now_s,
        reason=reason,
        targets=choice.instances,
    )
    return Record(instance=instance, model=model, tentative=True)
