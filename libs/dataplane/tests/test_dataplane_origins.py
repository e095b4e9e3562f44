"""Chunks from several origins: whatever breaks, stalls, lies or is not there, the image is the
source's or the error says why.
"""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled_chunks import BYTES, ONE, PART, PLAIN, Near

from pilotlight.checkpoint.digests import UNIT_BYTES, chunk_digest, unit_digests
from pilotlight.checkpoint.manifest import Chunk, Manifest
from pilotlight.common.clock import SystemClock
from pilotlight.common.errors import CorruptChunk, HostPoolFull, SourceChanged, SourceUnavailable
from pilotlight.common.testing import until
from pilotlight.dataplane.bandwidth import SourceLimits
from pilotlight.dataplane.chunk_fetch import ChunkFetch, Distrusted
from pilotlight.dataplane.chunk_fill import ChunkFill, ChunkWork
from pilotlight.dataplane.lanes import LaneLimits, Lanes
from pilotlight.dataplane.origin import NotHere
from pilotlight.dataplane.readers import Abandoned, Readers, Reading, ReadProgress
from pilotlight.policy.cluster import OriginKind
from pilotlight.policy.ids import Digest
from pilotlight.policy.model import Model


def test_the_digest_is_the_tree_that_the_decision_says() -> None:
    units = [blake3(BYTES[at : at + 1048576]).digest() for at in range(0, len(BYTES), 1048576)]
    assert len(units) == 5
    assert list(unit_digests(BYTES)) == units
    assert chunk_digest(BYTES) == blake3(b"".join(units)).hexdigest()


@dataclass
class Script:
    """What an origin does with a chunk."""

    does: str
    """``break``, ``end``, ``fail``: after a number of bytes. ``lie``: in the byte there. ``none``:
    it has nothing. ``good``."""
    after: int = 0
    piece: int = 100_000
    tells: str = ""
    """``list``: the true digests of its units. ``false``: others."""
    kind: OriginKind = OriginKind.PEER
    trusted: bool = False
    name: str = ""
    gave: int = 0
    begins: list[int] = field(default_factory=list)

    @property
    def link(self) -> str:
        return self.name

    def read(self, part: int, chunk: Chunk, work: ChunkWork) -> None:
        if self.does == "none":
            raise NotHere
        if self.tells:
            work.expect(unit_digests(BYTES if self.tells == "list" else BYTES[::-1]))
        self.begins.append(work.position)
        stop = (
            len(BYTES)
            if self.does in ("good", "lie")
            else min(len(BYTES), work.position + self.after)
        )
        data = bytearray(BYTES)
        if self.does == "lie":
            data[min(work.position + self.after, len(BYTES) - 1)] ^= 1
        while work.position < stop:
            piece = bytes(data[work.position : min(work.position + self.piece, stop)])
            self.gave += len(piece)
            work.write(piece)
        if self.does == "break" and work.left_bytes:
            raise SourceUnavailable(f"{self.name} broke")
        if self.does == "fail":
            raise SourceChanged(f"{self.name} is another one now")


@dataclass
class Told:
    """What an observer heard."""

    given: list[tuple[OriginKind, int]] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)

    def on_chunk(self, kind: OriginKind, name: str, size_bytes: int) -> None:
        self.given.append((kind, size_bytes))

    def on_origin_failed(self, kind: OriginKind, name: str, code: str) -> None:
        self.failed.append((name, code))


async def fetch_one(
    model: Model,
    source: Any,
    near: Sequence[Any],
    digest: Digest | None,
    told: Told,
    distrusted: Distrusted | None = None,
) -> bytes:
    """Fetch the chunk; the bytes that were placed."""
    clock, placed, readers = SystemClock(), bytearray(len(BYTES)), Readers(2, 5.0)

    def place(offset: int, data: memoryview) -> None:
        placed[offset : offset + len(data)] = data

    async def same() -> Manifest:
        return PLAIN

    chunks = ChunkFetch(
        model=model,
        manifest=PLAIN,
        source=source,
        nearby=[Near(*near)],
        lanes=Lanes(LaneLimits(least=2, most=2), SourceLimits(None, clock), clock),
        distrusted=distrusted or Distrusted(clock),
        reading=Reading(readers),
        rank=lambda _: (0,),
        observer=told,
        relearn=same,
    )
    fill = ChunkFill(digest, len(BYTES), place)
    try:
        async with asyncio.timeout(20):
            await chunks.fetch(PART, 0, fill)
    finally:
        readers.stop()
    assert fill.is_whole
    assert fill.found == chunk_digest(BYTES)
    assert fill.verified_bytes == len(BYTES)
    return bytes(placed)


@pytest.fixture
def model(register) -> Model:
    return register("template").model


POINTS = st.integers(0, len(BYTES))
SCRIPTS = st.builds(
    Script,
    does=st.sampled_from(["break", "break", "end", "lie", "none", "fail"]),
    after=POINTS,
    piece=st.integers(50_000, 3_000_000),
    tells=st.sampled_from(["", "list", "list", "false"]),
)


@settings(max_examples=50, deadline=None)
@given(
    scripts=st.lists(SCRIPTS, max_size=5),
    piece=st.integers(50_000, 3_000_000),
    recorded=st.booleans(),
)
def test_whatever_origins_do_the_chunk_is_right(
    scripts: list[Script], piece: int, recorded: bool
) -> None:
    for number, script in enumerate(scripts):
        script.name = f"peer-{number}"
    source = Script("good", piece=piece, kind=OriginKind.SOURCE, trusted=True, name="source")
    told = Told()
    digest = chunk_digest(BYTES) if recorded else None
    assert asyncio.run(fetch_one(MODEL, source, scripts, digest, told)) == BYTES
    if not recorded:
        assert source.gave == len(BYTES), "nothing can tell whether what others give is right"
    for script in scripts:
        spoke = script.does != "none" and (recorded or bool(script.tells) or script.gave > 0)
        lied = spoke and (not recorded or script.does == "lie" or script.tells == "false")
        assert (script.name, CorruptChunk.code) not in told.failed or lied, (
            "only an origin that lies is called a liar"
        )
    # Each break costs less than a unit, each lie what it spoiled; only wrong bytes whose origin
    # cannot be told cost all.
    if recorded and all(
        script.does in ("break", "end", "none") and script.tells != "false" for script in scripts
    ):
        breaks = sum(bool(script.begins) for script in scripts)
        assert (
            source.gave + sum(script.gave for script in scripts) <= len(BYTES) + breaks * UNIT_BYTES
        )


MODEL: Any = None


@pytest.fixture(autouse=True)
def _model(model: Model) -> None:
    global MODEL
    MODEL = model


@pytest.mark.anyio
async def test_a_break_goes_on_at_the_byte_where_units_are_not_known(model: Model) -> None:
    first, second = Script("break", after=1_500_000, name="a"), Script("good", name="b")
    source = Script("good", kind=OriginKind.SOURCE, trusted=True, name="source")
    told = Told()
    assert await fetch_one(model, source, [first, second], chunk_digest(BYTES), told) == BYTES
    assert (first.begins, second.begins, source.begins) == ([0], [1_500_000], [])
    assert told.failed == [("a", SourceUnavailable.code)]


@pytest.mark.anyio
async def test_a_break_goes_on_at_a_whole_unit_where_they_are_known(model: Model) -> None:
    first, second = (
        Script("break", after=1_500_000, tells="list", name="a"),
        Script("good", name="b"),
    )
    source = Script("good", kind=OriginKind.SOURCE, trusted=True, name="source")
    assert await fetch_one(model, source, [first, second], chunk_digest(BYTES), Told()) == BYTES
    assert second.begins == [UNIT_BYTES]


@pytest.mark.anyio
async def test_a_liar_is_noticed_at_the_unit_and_asked_nothing_for_a_while(model: Model) -> None:
    distrusted = Distrusted(SystemClock())
    for attempt in range(2):
        liar = Script("lie", after=UNIT_BYTES + 5, tells="list", name="liar")
        source = Script("good", kind=OriginKind.SOURCE, trusted=True, name="source")
        told = Told()
        assert (
            await fetch_one(model, source, [liar], chunk_digest(BYTES), told, distrusted) == BYTES
        )
        assert source.begins == [0 if attempt else UNIT_BYTES], "what was verified before stays"
        assert told.failed == ([] if attempt else [("liar", CorruptChunk.code)])
        assert (not liar.begins) == bool(attempt)
        assert distrusted.names == ("liar",)


@pytest.mark.anyio
async def test_wrong_bytes_of_several_are_blamed_on_nobody_until_one_gives_them_alone(
    model: Model,
) -> None:
    """The first one lies and breaks off; the one that goes on after it is not to blame."""
    liar = Script("lie", after=5, name="liar")
    liar.read = partly(liar, UNIT_BYTES // 2)
    honest = Script("good", name="honest")
    source = Script("good", kind=OriginKind.SOURCE, trusted=True, name="source")
    told = Told()
    assert await fetch_one(model, source, [liar, honest], chunk_digest(BYTES), told) == BYTES
    assert told.failed == [("liar", SourceUnavailable.code)]
    assert honest.begins == [UNIT_BYTES // 2, 0]
    assert source.begins == []


def partly(script: Script, stop: int) -> Any:
    def read(part: int, chunk: Chunk, work: ChunkWork) -> None:
        data = bytearray(BYTES[:stop])
        data[script.after] ^= 1
        work.write(data)
        raise SourceUnavailable("broke")

    return read


@pytest.mark.anyio
async def test_the_error_is_that_of_the_models_own_source(model: Model) -> None:
    scripts = [Script("break", name="a"), Script("lie", name="b")]
    source = Script("fail", after=9, kind=OriginKind.SOURCE, trusted=True, name="source")
    with pytest.raises(SourceChanged, match="source is another"):
        await fetch_one(model, source, scripts, chunk_digest(BYTES), Told())


@pytest.mark.anyio
async def test_a_full_pool_is_nobodys_fault(model: Model) -> None:
    class Full(Script):
        def read(self, part: int, chunk: Chunk, work: ChunkWork) -> None:
            raise HostPoolFull("full")

    told = Told()
    with pytest.raises(HostPoolFull):
        await fetch_one(
            model,
            Script("good", name="source", trusted=True),
            [Full("good", name="a")],
            chunk_digest(BYTES),
            told,
        )
    assert told.failed == []


def test_a_try_that_was_revoked_writes_nothing_any_more() -> None:
    placed: list[int] = []
    fill = ChunkFill(chunk_digest(BYTES), len(BYTES), lambda offset, data: placed.append(len(data)))
    late = fill.begin("late", ReadProgress())
    late.write(BYTES[:10])
    late.revoke()
    following = fill.begin("following", ReadProgress())
    following.write(BYTES[10:20])
    for again in (
        lambda: late.write(BYTES[20:30]),
        late.check,
        lambda: late.expect(unit_digests(BYTES)),
    ):
        with pytest.raises(Abandoned):
            again()
    assert (placed, following.position) == ([10, 10], 20)


def test_a_try_revoked_in_the_middle_of_a_write_ends_within_it() -> None:
    """A write is one unit at a time: to revoke it takes one at most, and after that nothing
    comes.
    """
    placed = 0
    started, go_on = threading.Event(), threading.Event()

    def place(offset: int, data: memoryview) -> None:
        nonlocal placed
        placed += len(data)
        started.set()
        assert go_on.wait(10)

    fill = ChunkFill(None, len(BYTES), place)
    work = fill.begin("a", ReadProgress(), trusted=True)
    raised: list[BaseException] = []

    def write() -> None:
        try:
            work.write(BYTES)
        except Abandoned as error:
            raised.append(error)

    writing, revoking = threading.Thread(target=write), threading.Thread(target=work.revoke)
    writing.start()
    assert started.wait(10)
    revoking.start()
    go_on.set()
    revoking.join(10)
    writing.join(10)
    if raised:
        assert placed < len(BYTES)
        assert fill.received_bytes == placed


@pytest.mark.anyio
async def test_what_nobody_has_recorded_comes_from_the_source_alone(make_node, register) -> None:
    peer = Script("good", name="peer")
    node = make_node(nearby=[Near(peer)])
    registered = node.add(register())
    claim = node.copies.claim(registered.model, [0, 1], ONE, leased=True)
    async with asyncio.timeout(10):
        assert [part.part async for part in node.copies.ready_parts(claim)] == [0, 1]
    # An origin whose bytes cannot be checked is asked for no more of them, and none was kept.
    assert node.seen.failed == [(OriginKind.PEER, "peer", CorruptChunk.code)]
    assert len(peer.begins) <= 2
    assert {kind for kind, _ in node.seen.given} == {OriginKind.SOURCE}


@pytest.mark.anyio
async def test_keepers_hear_of_verified_chunks_and_of_where_they_came_from(
    make_node, register
) -> None:
    kept: list[tuple[Digest, int, int, OriginKind]] = []

    class Keeping:
        def keep(
            self, digest: Digest, file_offset: int, size_bytes: int, kind: OriginKind, model: Digest
        ) -> None:
            assert model == registered.model.digest
            kept.append((digest, file_offset, size_bytes, kind))

    node = make_node(keepers=[Keeping()])
    registered = node.add(register())
    claim = node.copies.claim(registered.model, [1], ONE, leased=True)
    async with asyncio.timeout(10):
        assert [part.part async for part in node.copies.ready_parts(claim)] == [1]
    [(digest, offset, size_bytes, kind)] = kept
    data = node.pool.path.read_bytes()[offset : offset + size_bytes]
    assert (chunk_digest(data), kind) == (digest, OriginKind.SOURCE)


@pytest.mark.anyio
async def test_a_node_that_disputes_what_was_read_ends_the_fetch(make_node, register) -> None:
    node = make_node()
    registered = node.add(register())
    claim = node.copies.claim(registered.model, [0, 1], ONE, leased=False)
    async with asyncio.timeout(10):
        assert [part.part async for part in node.copies.ready_parts(claim)] == [0, 1]
    assert node.manifests.disputed is not None
    node.manifests.disputed(CorruptChunk("others were first"))
    await until(lambda: node.pool.find(registered.model.digest, 0) is None)
    assert claim.error is None, "it was served"
