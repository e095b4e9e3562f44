"""A loader obeys and reports: orders, leases, drops, epochs, and what it still has after a
restart.
"""

import msgspec
import pytest

from pilotlight.common.buckets import LEADER, NODES
from pilotlight.common.clock import ManualClock, moment_of
from pilotlight.common.errors import MessageUndecodable
from pilotlight.common.messages.hold import LEADING_KEY, Fetch, Leading
from pilotlight.common.messages.pool import RETURN_S
from pilotlight.common.messages.room import Drop, Wanted
from pilotlight.loader.testing import ALL, ONE, Cluster, fetch_of, holds
from pilotlight.policy.cluster import FetchPriority, NodeFacts, OriginKind
from pilotlight.policy.ids import Digest, Epoch, InstanceId, WorkerId
from pilotlight.policy.model import Model
from pilotlight.policy.phase import Moment, PhaseName

pytestmark = pytest.mark.anyio


async def test_an_order_is_fetched_reported_and_accounted_for(cluster: Cluster) -> None:
    model = cluster.register()
    running = await cluster.start()
    now = moment_of(running.context.clock)
    sent = Moment(at_s=now.at_s - 0.2, wall_offset_s=now.wall_offset_s)
    await cluster.hold(fetch_of(model), epoch=4, sent=sent)
    report = await cluster.heard.report(holds(model.digest))
    assert (report.epoch_seen, report.facts.node_id, report.dead_workers) == (
        4,
        cluster.node_id,
        (),
    )
    assert (
        report.facts.pool_bytes - report.facts.pool_free_bytes == report.facts.copies[0].size_bytes
    )
    await cluster.heard.until(lambda: cluster.heard.phases)
    [kept] = cluster.heard.phases
    assert (kept.instance_id, [phase.name for phase in kept.phases]) == (ONE, [PhaseName.FETCH])
    assert kept.phases[0].start_s == sent.at_s
    assert kept.phases[0].end_s > now.at_s
    # A worker finds everything there.
    assert await cluster.lease(model) == list(ALL)
    assert running.context.metrics.get_sample_value("pilotlight_fetches_total", {"code": ""}) == 1


async def test_a_repeated_order_changes_nothing(cluster: Cluster) -> None:
    model = cluster.register()
    running = await cluster.start()
    for _ in range(3):
        await cluster.hold(fetch_of(model))
    await cluster.heard.report(holds(model.digest))
    assert await cluster.drop(model.digest) == (model.digest,)
    await cluster.hold(fetch_of(model))
    await cluster.heard.report(lambda report: not report.facts.copies)
    await cluster.hold(fetch_of(model, generation=2))
    await cluster.heard.report(holds(model.digest))
    assert running.context.metrics.get_sample_value("pilotlight_fetches_total", {"code": ""}) == 2


async def test_a_lease_alone_moves_the_bytes(cluster: Cluster) -> None:
    model = cluster.register()
    await cluster.start()
    assert await cluster.lease(model, (1, 3)) == [1, 3]
    await cluster.heard.report(holds(model.digest, (1, 3)))


async def test_an_order_moves_nothing_where_a_start_is_not_to_begin_with_it(
    cluster: Cluster,
) -> None:
    model, ahead = cluster.register(), cluster.register("ahead", vocab_size=96)
    running = await cluster.start(start_prefetch=False)
    growth = msgspec.structs.replace(fetch_of(ahead, "inst-2"), priority=FetchPriority.PREFETCH)
    await cluster.hold(fetch_of(model), growth)
    await cluster.heard.report(holds(ahead.digest))
    fetched = running.context.metrics.get_sample_value("pilotlight_fetches_total", {"code": ""})
    assert fetched == 1, "what a stage grows by, alone"
    assert await cluster.lease(model) == list(ALL)
    await cluster.heard.report(holds(model.digest))


async def test_a_lease_is_in_the_way_of_a_drop(cluster: Cluster) -> None:
    model = cluster.register()
    await cluster.start()
    async with await cluster.client().lease(WorkerId("w"), ONE, model, ALL) as lease:
        assert [part.part async for part in lease] == list(ALL)
        assert await cluster.drop(model.digest) == ()
        await cluster.heard.report(
            lambda report: [copy.leases for copy in report.facts.copies] == [1]
        )
    await cluster.heard.report(lambda report: [copy.leases for copy in report.facts.copies] == [0])
    assert await cluster.drop(model.digest) == (model.digest,)


async def test_says_whether_what_is_wanted_fits_in_between(cluster: Cluster) -> None:
    """Sixteen units, four for each of four models: of those of every other one no five lie in a
    row.
    """
    unit = 64 * 1024
    models = [cluster.register(f"tiny-{number}", vocab_size=96 + number) for number in range(4)]
    await cluster.start(pool_bytes=16 * unit)
    for model in models:
        assert await cluster.lease(model) == list(ALL)
    report = await cluster.heard.report(lambda report: len(report.facts.copies) == 4)
    assert (report.facts.pool_free_bytes, report.facts.pool_largest_free_bytes) == (0, 0)
    whole = Wanted(digest=Digest("ab" * 32), parts=(0, 1), part_bytes=(5 * unit, 3 * unit))
    reply = await cluster.make_room(
        Drop(digests=(models[0].digest, models[2].digest), wanted=whole)
    )
    assert (set(reply.digests), reply.fits) == ({models[0].digest, models[2].digest}, False)
    report = await cluster.heard.report(lambda report: len(report.facts.copies) == 2)
    assert (report.facts.pool_free_bytes, report.facts.pool_largest_free_bytes) == (
        8 * unit,
        4 * unit,
    )
    half = Wanted(digest=Digest("ab" * 32), parts=(0, 1), part_bytes=(4 * unit, 4 * unit))
    assert (await cluster.make_room(Drop(digests=(), wanted=half))).fits
    # What of a model is there already needs no room.
    there = Wanted(digest=models[1].digest, parts=ALL, part_bytes=(5 * unit,) * 4)
    assert (await cluster.make_room(Drop(digests=(), wanted=there))).fits
    assert (await cluster.make_room(Drop(digests=(models[1].digest,), wanted=whole))).fits


async def test_a_loader_that_took_over_gives_nothing_up_at_once(cluster: Cluster) -> None:
    """Workers that lived on may be reading by a lease that it has not heard of yet."""
    model = cluster.register()
    running = await cluster.start(handover=True)
    assert await cluster.lease(model) == list(ALL)
    await running.stop()
    clock = ManualClock()
    await cluster.start(handover=True, clock=clock)
    assert await cluster.drop(model.digest) == ()
    clock.advance(RETURN_S)
    assert await cluster.drop(model.digest) == (model.digest,)


def ahead(model: Model, attempt: int = 1) -> Fetch:
    """An order of the cache: for no instance."""
    return msgspec.structs.replace(
        fetch_of(model, generation=attempt),
        instance_id=InstanceId(""),
        priority=FetchPriority.PREFETCH,
    )


async def test_what_is_fetched_ahead_belongs_to_no_start(cluster: Cluster) -> None:
    model = cluster.register()
    running = await cluster.start()
    await cluster.prefetch(ahead(model), seq=1)
    await cluster.heard.report(holds(model.digest))
    await cluster.prefetch(ahead(model), seq=2)
    assert await cluster.drop(model.digest) == (model.digest,), "it is in nothing's way"
    await cluster.heard.report(lambda report: not report.facts.copies)
    await cluster.prefetch(ahead(model), seq=1)
    await cluster.prefetch(ahead(model, attempt=2), seq=3)
    await cluster.heard.report(holds(model.digest))
    assert not cluster.heard.phases
    assert running.context.metrics.get_sample_value("pilotlight_fetches_total", {"code": ""}) == 2


async def test_a_start_takes_over_what_is_fetched_ahead(cluster: Cluster) -> None:
    model = cluster.register()
    await cluster.start(link="400kbit")
    await cluster.prefetch(ahead(model), seq=1)
    report = await cluster.heard.report(lambda report: report.facts.transfers)
    assert report.facts.transfers[0].priority is FetchPriority.PREFETCH
    await cluster.hold(fetch_of(model))
    await cluster.heard.report(
        lambda report: (
            report.facts.transfers
            and report.facts.transfers[0].priority is FetchPriority.COLD_START
        )
    )
    await cluster.prefetch(seq=2)
    await cluster.heard.report(holds(model.digest))


async def test_what_is_not_to_be_fetched_ahead_any_more_ends(cluster: Cluster) -> None:
    model = cluster.register()
    await cluster.start(link="8kbit")
    await cluster.prefetch(ahead(model), seq=1)
    await cluster.heard.report(lambda report: report.facts.transfers)
    await cluster.prefetch(seq=2)
    await cluster.heard.report(lambda report: not report.facts.transfers)


async def test_what_nobody_wants_any_more_is_not_fetched_on(cluster: Cluster) -> None:
    model = cluster.register()
    running = await cluster.start(link="8kbit")
    await cluster.hold(fetch_of(model))
    report = await cluster.heard.report(lambda report: report.facts.transfers)
    assert report.facts.transfers[0].total_bytes == model.spec.total_bytes
    await cluster.hold()
    await cluster.heard.report(lambda report: not report.facts.transfers)
    await cluster.heard.report(
        lambda report: report.facts.pool_free_bytes == report.facts.pool_bytes
    )
    assert running.context.metrics.get_sample_value("pilotlight_fetched_bytes_total") == 0


async def test_a_report_says_how_far_a_transfer_is_from_whom_it_has_it_and_how_much_it_matters(
    cluster: Cluster,
) -> None:
    model = cluster.register()
    running = await cluster.start(link="400kbit")
    prefetch = msgspec.structs.replace(fetch_of(model), priority=FetchPriority.PREFETCH)
    await cluster.hold(prefetch)
    report = await cluster.heard.report(lambda report: report.facts.transfers)
    transfer = report.facts.transfers[0]
    assert (transfer.model, transfer.source, transfer.priority) == (
        model.name,
        model.uri,
        FetchPriority.PREFETCH,
    )
    # Said again, an order is as urgent as it is said to be now.
    await cluster.hold(fetch_of(model))
    report = await cluster.heard.report(
        lambda report: (
            [one.priority for one in report.facts.transfers] == [FetchPriority.COLD_START]
        )
    )
    report = await cluster.heard.report(
        lambda report: any(one.origins for one in report.facts.transfers)
    )
    [share] = report.facts.transfers[0].origins
    assert (share.kind, share.name) == (OriginKind.SOURCE, model.uri)
    assert (
        0
        < share.size_bytes
        <= report.facts.transfers[0].total_bytes + report.facts.pool_unit_bytes * len(ALL)
    )
    await cluster.heard.report(holds(model.digest))
    report = await cluster.heard.report(lambda report: report.facts.links)
    [link] = report.facts.links
    assert (link.kind, link.name) == (OriginKind.SOURCE, "file://")
    assert 0 < link.bytes_per_s < 400_000 / 8 * 1.5, "what the limit lets through"
    bucket = await running.context.bus.bucket(NODES)
    written = await bucket.get(cluster.node_id, NodeFacts)
    assert written.value is not None
    assert written.value.links == (), "what changes all the time is in the reports alone"


async def test_older_epochs_are_refused_also_after_a_restart(cluster: Cluster) -> None:
    model, other = cluster.register(), cluster.register("other", vocab_size=64)
    running = await cluster.start(handover=True)
    await cluster.hold(fetch_of(model), epoch=7)
    await cluster.heard.report(holds(model.digest))
    await cluster.hold(fetch_of(other), epoch=6)
    await cluster.hold(fetch_of(model), epoch=7)
    await running.counts("pilotlight_stale_commands_total")
    await running.stop()

    for handover in (False, True):
        cluster.heard.reports.clear()
        again = await cluster.start(handover=handover)
        report = await cluster.heard.report(lambda report: True)
        assert report.epoch_seen == 7
        await cluster.hold(fetch_of(other, "inst-2"), epoch=6)
        await cluster.hold(epoch=8 if handover else 7)
        await again.counts("pilotlight_stale_commands_total")
        await again.stop()
    assert [copy.digest for copy in report.facts.copies] == [], (
        "the pool was removed when the loader stopped for good"
    )


@pytest.mark.parametrize("host_restarted", [False, True])
async def test_a_loader_that_was_away_knows_who_leads_now(
    cluster: Cluster, host_restarted: bool
) -> None:
    """Its own memory says 7, or nothing; 8 was announced while it was away, and never told to
    it.
    """
    model = cluster.register()
    running = await cluster.start(handover=True)
    await cluster.hold(epoch=7)
    await cluster.heard.report(lambda report: report.epoch_seen == 7)
    await running.stop()
    if host_restarted:
        (cluster.folder / "pool").unlink()
    bucket = await cluster.bus.bucket(LEADER)
    await bucket.put(LEADING_KEY, Leading(epoch=Epoch(8)))
    cluster.heard.reports.clear()
    again = await cluster.start()
    await cluster.hold(fetch_of(model), epoch=7)
    await again.counts("pilotlight_stale_commands_total")
    report = await cluster.heard.report(lambda report: True)
    assert {one.epoch_seen for one in cluster.heard.reports} == {8}
    assert not report.facts.copies
    assert not report.facts.transfers
    await cluster.hold(fetch_of(model), epoch=8)
    await cluster.heard.report(holds(model.digest))


async def test_a_loader_that_cannot_ask_who_leads_does_not_start(cluster: Cluster) -> None:
    bucket = await cluster.bus.bucket(LEADER)
    await bucket.put(LEADING_KEY, "nonsense")
    with pytest.raises(MessageUndecodable):
        await cluster.start()


async def test_a_restarted_loader_has_the_copies_still(cluster: Cluster) -> None:
    model = cluster.register()
    running = await cluster.start(handover=True)
    assert await cluster.lease(model) == list(ALL)
    await running.stop()
    cluster.heard.reports.clear()
    await cluster.start()
    await cluster.heard.report(holds(model.digest))
    (cluster.folder / "models" / "tiny" / "model.safetensors").unlink()
    assert await cluster.lease(model) == list(ALL)
