"""Chains: nodes that take a model's chunks from one another, over real sockets."""

import errno
import os
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from linked_chain import Chain, expected, gated, image_of, large, order, strip, whole

from pilotlight.checkpoint.digests import UNIT_BYTES
from pilotlight.common.clock import ManualClock
from pilotlight.common.testing import until
from pilotlight.dataplane.link.peer import LinkState
from pilotlight.dataplane.link.yielding import HOLD_S
from pilotlight.policy.cluster import FetchPriority, OriginKind

pytestmark = pytest.mark.anyio
Register = Callable[..., Any]


@pytest.fixture
async def chain(make_node: Callable[..., Any]) -> AsyncIterator[Chain]:
    made = Chain(make_node)
    yield made
    await made.stop()


async def test_a_chain_takes_every_byte_from_its_source_once(
    chain: Chain, register: Register
) -> None:
    registered = large(register)
    source, a, b, c = [await chain.add(name) for name in "sabc"]
    await whole(source, order(source, registered, []))
    claims = [
        order(a, registered, [source]),
        order(b, registered, [a, source]),
        order(c, registered, [b, a, source]),
    ]
    for linked, claim in zip((a, b, c), claims, strict=True):
        await whole(linked, claim)
        for part in range(len(registered.manifest.parts)):
            assert image_of(linked, registered, part) == expected(registered, part)
        assert {kind for kind, _ in linked.node.seen.given} == {OriginKind.PEER}
        assert not chain.taken(linked.me.node_id)
    total = sum(part.image_bytes for part in registered.manifest.parts)
    assert source.traffic.sent == {"a": total}
    assert a.traffic.sent == {"b": total}
    assert b.traffic.sent == {"c": total}
    assert c.traffic.received == {"b": total}
    assert LinkState.UP in c.peers.states.values()


async def test_a_unit_is_passed_on_before_its_chunk_is_complete(
    chain: Chain, register: Register
) -> None:
    registered = large(register)
    source, a, b = [await chain.add(name) for name in "sab"]
    await whole(source, order(source, registered, []))
    gate, behind_gate = await gated(chain, source, 3 * UNIT_BYTES)
    first, second = order(a, registered, [behind_gate], [1, 2]), order(b, registered, [a], [1, 2])
    await until(lambda: gate.is_held_up and b.traffic.received.get("a", 0) >= 2 * UNIT_BYTES)
    # A has not even one chunk, and what it has B has too.
    assert not a.node.seen.given
    gate.open()
    await whole(a, first)
    await whole(b, second)
    assert all(image_of(b, registered, part) == expected(registered, part) for part in (1, 2))
    assert not chain.taken("a")
    assert not chain.taken("b")


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_a_predecessor_does_the_bytes_are_right(
    chain: Chain, register: Register, seed: int
) -> None:
    """It dies, stalls or lies at any byte: its successor goes on with the node before it."""
    rng = random.Random(seed)
    registered = large(register)
    total = sum(part.image_bytes for part in registered.manifest.parts)
    at, does = rng.randrange(200, total), rng.choice(["die", "stall", "lie"])
    source, a, c = [await chain.add(name) for name in "sac"]
    b = await chain.add("b", **({"stall_timeout_s": 0.5} if does == "stall" else {}))
    await whole(source, order(source, registered, []))
    gate, behind_gate = await gated(chain, a, at if does != "lie" else None)
    gate.flipped_at = at if does == "lie" else None
    claims = [
        order(a, registered, [source]),
        order(b, registered, [behind_gate, source]),
        order(c, registered, [b, source]),
    ]
    if does == "die":
        await until(lambda: gate.is_held_up, deadline_s=30)
        await gate.cut()
    for linked, claim in zip((a, b, c), claims, strict=True):
        await whole(linked, claim)
        assert all(
            image_of(linked, registered, part) == expected(registered, part) for part in range(4)
        )
        assert not chain.taken(linked.me.node_id)
    assert {name for _, name, _ in b.node.seen.failed} == {"a"}
    assert not c.node.seen.failed
    # Nothing that was verified came twice: at most the units and the list that were under way when
    # it broke.
    assert sum(size for _, size in b.node.seen.given) <= total
    assert b.traffic.received["s"] <= total - max(0, at - 20 * UNIT_BYTES)


async def test_a_liar_is_named_and_asked_no_more(chain: Chain, register: Register) -> None:
    registered = large(register)
    source, liar, b = [await chain.add(name) for name in ("s", "liar", "b")]
    await whole(source, order(source, registered, []))
    await whole(liar, order(liar, registered, [source]))
    image = liar.node.pool.find(registered.model.digest, 1)
    with liar.node.pool.view(image, 3 * UNIT_BYTES, 10) as view:
        view[5] ^= 0x10
    await whole(b, order(b, registered, [liar, source]))
    assert all(image_of(b, registered, part) == expected(registered, part) for part in range(4))
    assert ("peer", "liar", "corrupt_chunk") in b.node.seen.failed
    assert b.node.tools.distrusted.names == ("liar",)
    assert not chain.taken("b")


async def test_without_any_survivor_the_rest_comes_from_the_source_at_the_byte(
    chain: Chain, register: Register
) -> None:
    registered = large(register)
    source, a, b = [await chain.add(name) for name in "sab"]
    await whole(source, order(source, registered, []))
    await whole(a, order(a, registered, [source]))
    gate, behind_gate = await gated(chain, a, 5 * UNIT_BYTES + 300_000)
    claim = order(b, registered, [behind_gate])
    await until(lambda: gate.is_held_up)
    await gate.cut()
    await whole(b, claim)
    assert all(image_of(b, registered, part) == expected(registered, part) for part in range(4))
    begun = [at for opened in chain.sources["b"] for at in opened.begun]
    assert max(begun) >= UNIT_BYTES
    assert any(at % UNIT_BYTES == 0 for at in begun if at)


async def test_a_late_joiner_takes_from_the_tail_and_who_has_finished_gives(
    chain: Chain, register: Register
) -> None:
    registered = large(register)
    source, a, late = [await chain.add(name) for name in ("s", "a", "late")]
    await whole(source, order(source, registered, []))
    gate, behind_gate = await gated(chain, source, 9 * UNIT_BYTES)
    first = order(a, registered, [behind_gate])
    await until(lambda: gate.is_held_up)
    second = order(late, registered, [a])
    await until(lambda: late.traffic.received.get("a", 0) >= 5 * UNIT_BYTES)
    gate.open()
    await whole(a, first)
    await whole(late, second)
    assert not chain.taken("late")
    assert image_of(late, registered, 1) == expected(registered, 1)
    again = await chain.add("again")
    await whole(again, order(again, registered, [late]))
    assert again.traffic.received.keys() == {"late"}


async def test_who_reads_a_model_first_gives_it_part_by_part(
    chain: Chain, register: Register
) -> None:
    """No digest is recorded: the second node waits for the first one's, rather than read the source
    as well.
    """
    registered = large(register)
    registered.manifest = strip(registered.manifest)
    a, b, c = [await chain.add(name) for name in "abc"]
    for linked in (b, c):
        linked.node.manifests.manifests = a.node.manifests.manifests
    claims = [order(a, registered, []), order(b, registered, [a]), order(c, registered, [b, a])]
    for linked, claim in zip((a, b, c), claims, strict=True):
        await whole(linked, claim)
        assert all(
            image_of(linked, registered, part) == expected(registered, part) for part in range(4)
        )
    assert chain.taken("a")
    assert not chain.taken("b")
    assert not chain.taken("c")


async def test_who_never_hears_of_a_digest_reads_the_source(
    chain: Chain, register: Register
) -> None:
    registered = large(register)
    registered.manifest = strip(registered.manifest)
    a, b = await chain.add("a"), await chain.add("b")
    await whole(a, order(a, registered, []))
    await whole(b, order(b, registered, [a]))
    assert image_of(b, registered, 1) == expected(registered, 1)
    assert len(chain.taken("b")) == len(chain.taken("a"))


async def test_a_node_that_has_not_heard_of_its_order_yet_is_waited_for(
    chain: Chain, register: Register
) -> None:
    registered = large(register)
    source, a, b = [await chain.add(name) for name in "sab"]
    await whole(source, order(source, registered, []))
    second = order(b, registered, [a])
    await until(lambda: a.server is not None and a.server.connections == 1)
    first = order(a, registered, [source])
    await whole(a, first)
    await whole(b, second)
    assert not chain.taken("b")


async def test_a_node_that_has_nothing_to_do_with_it_is_not(
    chain: Chain, register: Register
) -> None:
    registered = large(register)
    a, b = await chain.add("a"), await chain.add("b")
    await whole(b, order(b, registered, [a]))
    assert image_of(b, registered, 1) == expected(registered, 1)
    # Nothing is wrong with A.
    assert not b.node.seen.failed


async def test_what_is_being_sent_stays(chain: Chain, register: Register) -> None:
    registered = large(register)
    source, a = await chain.add("s"), await chain.add("a")
    await whole(source, order(source, registered, []))
    for claim in list(source.node.copies._claims[registered.model.digest]):
        source.node.copies.release(claim)
    gate, behind_gate = await gated(chain, source, 2 * UNIT_BYTES)
    claim = order(a, registered, [behind_gate])
    await until(lambda: gate.is_held_up)
    assert source.node.copies.drop([registered.model.digest]) == ()
    gate.open()
    await whole(a, claim)
    await until(lambda: not source.node.pool.is_pinned(registered.model.digest))
    assert source.node.copies.drop([registered.model.digest]) == (registered.model.digest,)


async def test_the_room_of_a_part_that_is_given_up_is_free_once_nobody_is_sent_it(
    chain: Chain, register: Register
) -> None:
    """A fetch fails while its units are on their way to another node: their place is not given to
    another part until that one has them.
    """
    registered = large(register)
    source, a, b = [await chain.add(name) for name in "sab"]
    await whole(source, order(source, registered, []))
    gate, behind_source = await gated(chain, source, 3 * UNIT_BYTES)
    slow, behind_a = await gated(chain, a, UNIT_BYTES)
    first, second = order(a, registered, [behind_source]), order(b, registered, [behind_a, source])
    pool = a.node.pool
    await until(lambda: gate.is_held_up and slow.is_held_up)
    # The first part is verified beside what comes behind it.
    await until(lambda: pool.find(registered.model.digest, 0) is not None)
    a.node.copies.release(first)
    await until(lambda: a.node.copies.held(registered.model.digest, 1, 0) is None)
    kept = pool.find(registered.model.digest, 0)
    assert pool.free_bytes < pool.geometry.data_bytes - kept.extent.size_bytes
    slow.open()
    await whole(b, second)
    assert all(image_of(b, registered, part) == expected(registered, part) for part in range(4))
    await until(lambda: pool.free_bytes == pool.geometry.data_bytes - kept.extent.size_bytes)
    assert not b.node.seen.failed


async def test_two_nodes_that_wait_for_each_other_do_not_for_ever(
    chain: Chain, register: Register
) -> None:
    registered = large(register)
    a, b = [await chain.add(name, stall_timeout_s=0.2) for name in "ab"]
    for linked, claim in [(a, order(a, registered, [b])), (b, order(b, registered, [a]))]:
        await whole(linked, claim)
        assert image_of(linked, registered, 1) == expected(registered, 1)
    assert chain.taken("a") or chain.taken("b")


async def test_what_is_fetched_ahead_waits_until_a_cold_start_sends_no_more(
    chain: Chain, register: Register
) -> None:
    registered, clock = large(register), ManualClock()
    source = await chain.add("s", clock=clock)
    await whole(source, order(source, registered, []))
    cold, ahead = await chain.add("cold"), await chain.add("ahead")
    await whole(cold, order(cold, registered, [source]))
    # At the sender no time has passed since.
    claim = order(ahead, registered, [source], priority=FetchPriority.PREFETCH)
    await until(lambda: source.server is not None and source.server.connections == 2)
    await until(lambda: source.node.pool.is_pinned(registered.model.digest))
    assert ahead.traffic.received == {}
    clock.advance(2 * HOLD_S)
    await whole(ahead, claim)
    assert not chain.taken("ahead")


async def test_a_pool_that_cannot_be_sent_from_is_read(
    chain: Chain, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on hugetlbfs."""

    def refuse(*args: Any) -> int:
        raise OSError(errno.EINVAL, "no")

    monkeypatch.setattr(os, "sendfile", refuse)
    registered = large(register)
    source, a = await chain.add("s"), await chain.add("a")
    await whole(source, order(source, registered, []))
    await whole(a, order(a, registered, [source]))
    assert image_of(a, registered, 1) == expected(registered, 1)
    assert not chain.taken("a")


async def test_an_adopted_copy_is_given_and_a_damaged_one_is_not(
    chain: Chain, register: Register
) -> None:
    """A loader that took over a pool knows its chunks' digests, and no unit's."""
    registered = large(register)
    source, a = await chain.add("s"), await chain.add("a")
    await whole(source, order(source, registered, []))
    for part in range(4):
        source.node.pool.find(registered.model.digest, part).units.clear()
    image = source.node.pool.find(registered.model.digest, 2)
    with source.node.pool.view(image, 4 * UNIT_BYTES, 1) as view:
        view[0] ^= 1
    await whole(a, order(a, registered, [source]))
    assert all(image_of(a, registered, part) == expected(registered, part) for part in range(4))
    assert {part for part, _ in chain.taken("a")} == {2}
    assert len(chain.taken("a")) == 1
    # A node that says that its memory is damaged tells no lie.
    assert not a.node.seen.failed
