"""Which text helpers hold a model's bundle, and the giving of it to more of them, with no client's
job behind it.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from typing import Any, Protocol

import msgspec
import structlog

from pilotlight.common.errors import PilotlightError
from pilotlight.common.waiting import cancel_all
from pilotlight.gateway.texts.bundles import Bundles
from pilotlight.gateway.texts.frames import Failed, Give, Hello, Missing, Reply
from pilotlight.gateway.texts.process import HelperLost, HelperProcess
from pilotlight.gateway.texts.strikes import WINDOW_S, Strikes
from pilotlight.gateway.texts.waiting_jobs import TextJob
from pilotlight.policy.ids import Digest
from pilotlight.policy.lanes import LaneHolders, LaneJob, waits_for_holder, wants_holder

log = structlog.get_logger()

FETCH_REST_S = 2.0
"""At least, before a bundle is asked for again that could not be had, or whose helper was ended
from outside."""
LOAD_REST_S = WINDOW_S / 2
"""At least, before one is given again that could not be loaded. Two strikes within their window,
and not three: loading alone has no model refused whose holder works."""
REST_SPREAD = 1.5
"""A rest takes up to so many times as long: gateways do not ask in step."""
LOADING = Hello.__name__.lower()
"""Kind of the job that follows a bundle that no client's job brings."""


class Spawner(Protocol):
    """Owner of what runs in the background (``Background``)."""

    def spawn(self, name: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run it."""
        ...


class Running(msgspec.Struct, frozen=True):
    """Jobs at work, by one helper."""

    jobs: list[TextJob]
    helper: HelperProcess
    late: asyncio.TimerHandle
    """Ends it at its deadline."""
    began_s: float


def helper_for(model: str, idle: Sequence[HelperProcess]) -> HelperProcess:
    """The idle helper that a job goes to: one that holds its bundle, or else the one that holds
    least: a holder is left to those who would have to wait for it.
    """
    latest = idle[-1]
    if model in latest.held:
        return latest
    holder = next((one for one in reversed(idle) if model in one.held), None)
    return holder or _holds_least(idle)


def helper_without(model: str, idle: Sequence[HelperProcess]) -> HelperProcess | None:
    """The idle helper to be given a bundle; None where none lacks it."""
    lacking = [one for one in idle if model not in one.held and not one.line.gone]
    return _holds_least(lacking) if lacking else None


def _holds_least(helpers: Sequence[HelperProcess]) -> HelperProcess:
    """Of those that hold as little, the one that worked last: its memory is in the caches."""
    return min(reversed(helpers), key=lambda one: len(one.held))


def _holders_of(
    model: str, idle: Iterable[HelperProcess], running: Iterable[Running]
) -> LaneHolders:
    """Who holds a model's bundle. One that was lost holds nothing."""
    busy = given = False
    for each in running:
        if each.helper.over:
            continue
        lane = each.jobs[0].lane
        if model in each.helper.held:
            busy = True
        elif lane.model == model:
            # One that is given it with a long job will hold it when that is done.
            busy, given = busy or lane.long, given or not lane.long
    return LaneHolders(idle=any(model in one.held for one in idle), busy=busy, given=given)


class Holders:
    """Has jobs wait for helpers that hold their model's bundle, and more helpers hold it."""

    def __init__(
        self,
        bundles: Bundles,
        strikes: Strikes,
        spawner: Spawner,
        give: Callable[[Give], Awaitable[Reply | None]],
    ) -> None:
        """Nothing is loaded yet.

        Args:
            bundles: where they come from.
            strikes: of models that end helpers.
            spawner: owner of the tasks.
            give: has a helper load one; None where none may now. Raises ``HelperLost``.
        """
        self._bundles = bundles
        self._strikes = strikes
        self._spawner = spawner
        self._give = give
        self._tasks: dict[Digest, asyncio.Task[None]] = {}
        self._rests: dict[Digest, float] = {}
        """Until when those are left alone that failed."""
        self._rng = random.Random()

    def going(
        self,
        heads: Sequence[LaneJob],
        idle: Sequence[HelperProcess],
        running: Collection[Running],
        next_of: Callable[[list[LaneJob]], LaneJob | None],
    ) -> list[LaneJob]:
        """Those that wait for no helper that holds, or is given, their model's bundle. For those
        that do, one more is given it.

        Args:
            heads: jobs that may be next.
            idle: helpers, at least one.
            running: jobs at work.
            next_of: which of some jobs the bounds let begin.
        """
        models = {head.model for head in heads if head.model}
        found = {model: _holders_of(model, idle, running) for model in models}
        going: list[LaneJob] = []
        for head in heads:
            holders = found.get(head.model)
            if holders is None or not waits_for_holder(holders):
                going.append(head)
            elif wants_holder(holders) and next_of([head]) is not None:
                self._want(Digest(head.model))
        return going

    def note(self, helper: HelperProcess, job: TextJob, reply: Reply) -> None:
        """What a reply tells of who holds the job's bundle."""
        model = job.lane.model
        if isinstance(reply, Missing):
            helper.held.discard(model)
        elif isinstance(reply, Failed):
            # A client's job may fail by itself, behind a bundle that was loaded.
            if job.give is not None and job.kind != LOADING:
                helper.held.add(model)
        elif model:
            helper.held.add(model)

    async def stop(self) -> None:
        """Nothing is loaded any more."""
        await cancel_all(self._tasks.values())

    def _want(self, model: Digest) -> None:
        """Have one helper more hold it, unless that is under way, or failed a short while ago."""
        now_s = asyncio.get_running_loop().time()
        if model in self._tasks or self._rests.get(model, now_s) > now_s:
            return
        task = self._spawner.spawn("load a text bundle", self._load(model))
        self._tasks[model] = task
        task.add_done_callback(lambda _: self._tasks.pop(model))

    async def _load(self, model: Digest) -> None:
        try:
            self._strikes.check(model)
            give = Give(digest=model, bundle=await self._bundles.get(model))
            reply = await self._give(give)
        except HelperLost as lost:
            if lost.blamed:
                self._strikes.add(model)
            self._failed(model, lost.reason, LOAD_REST_S if lost.blamed else FETCH_REST_S)
        except PilotlightError as error:
            self._failed(model, error.message, FETCH_REST_S)
        else:
            if isinstance(reply, Failed):
                self._failed(model, reply.message, LOAD_REST_S)

    def _failed(self, model: Digest, reason: str, rest_s: float) -> None:
        """No job is harmed: all go on with who holds it."""
        log.warning(
            "no other helper could be given a text bundle",
            action="text_load_failed",
            text_digest=model,
            reason=reason,
        )
        now_s = asyncio.get_running_loop().time()
        rests = {other: until_s for other, until_s in self._rests.items() if until_s > now_s}
        self._rests = {**rests, model: now_s + rest_s * self._rng.uniform(1.0, REST_SPREAD)}
