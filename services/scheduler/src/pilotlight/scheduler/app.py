"""Wiring of the scheduler."""

import asyncio

from pilotlight.common.buckets import INSTANCES, LEADER
from pilotlight.common.db.measures import measure
from pilotlight.common.db.outbox import Outbox
from pilotlight.common.db.retention import PruneMetrics
from pilotlight.common.db.session import Database
from pilotlight.common.errors import BusUnavailable, NotLeader
from pilotlight.common.report_style import ReportStyle
from pilotlight.common.service import Application, Context
from pilotlight.policy.ids import Epoch
from pilotlight.scheduler.election import Election
from pilotlight.scheduler.garbage import between_turns
from pilotlight.scheduler.handlers import LeaderSubjects, Listening
from pilotlight.scheduler.leader import Term
from pilotlight.scheduler.lease import Fence, Lease
from pilotlight.scheduler.metrics import SchedulerMetrics
from pilotlight.scheduler.registered import ModelReader
from pilotlight.scheduler.settings import SchedulerSettings
from pilotlight.scheduler.term_context import TermContext
from pilotlight.scheduler.world import World


async def build(context: Context[SchedulerSettings]) -> Application:
    """Build the service."""
    database = Database(context.settings, "scheduler", context.clock)
    outbox = Outbox(database, context)
    measure(database, outbox, context.metrics)
    world = World(listening_since_s=context.clock.monotonic_s())
    wake = asyncio.Event()
    listening = Listening(context, world, ModelReader(database), wake)
    term_context = TermContext(
        context=context,
        database=database,
        world=world,
        wake=wake,
        bucket=await context.bus.bucket(INSTANCES),
        leader_bucket=await context.bus.bucket(LEADER),
        metrics=SchedulerMetrics(context.metrics),
        prune_metrics=PruneMetrics(context.metrics),
    )
    lease = Lease(database, f"{context.service}-{context.incarnation}", context.clock)

    async def lead(epoch: Epoch) -> None:
        # From the first row on: a look at what was read is no part of a takeover.
        with between_turns(context.clock.monotonic_s()):
            term = Term(
                term_context, Fence(database, lease.holder, epoch), lambda: election.check(epoch)
            )
            await term.load()
            subjects = LeaderSubjects(context, term, listening, world)
            try:
                await subjects.start()
                await term.lead()
            except BusUnavailable as error:
                raise NotLeader(f"NATS cannot be led over: {error.message}") from error
            finally:
                await subjects.stop()

    election = Election(lease, lead, world.epoch_seen, context.clock, context.background)
    return Application(
        components=[
            database,
            outbox,
            listening,
            ReportStyle(context.bus, context.clock, context.background),
            election,
        ],
        ready=lambda: election.database_error,
    )
