"""The disk tier: never above its limit, nothing wrong or unfinished is ever given, and it outlives
the process that uses it.
"""

import contextlib
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from confined import run_python
from disk_tiers import KIB, Tier, content_of, read_by
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from killed_writers import DISK_CONTENTS, DISK_SIZES, disk_content, killed, started, store_for_ever

from pilotlight.checkpoint.digests import UNIT_BYTES, chunk_digest
from pilotlight.common.errors import DiskTierTaken
from pilotlight.dataplane.chunk_fill import MixedBytes
from pilotlight.dataplane.disk_tier import BLOCK_BYTES, RETRY_S, DiskEvent, DiskOrigin, Unwritten
from pilotlight.dataplane.origin import NotHere
from pilotlight.policy.cluster import OriginKind
from pilotlight.policy.ids import Digest


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def file_of(folder: Path, digest: Digest) -> Path:
    return folder / digest[:2] / f"{digest}.chunk"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "tier"


def test_what_is_stored_is_read_again_also_after_a_restart(folder: Path):
    one = Tier(folder)
    contents = [
        content_of(seed, size) for seed, size in enumerate((64, 4096, 5 * KIB, 2 * UNIT_BYTES + 64))
    ]
    one.tier.limit_bytes = 4 * UNIT_BYTES
    digests = [one.store(content) for content in contents]
    assert [
        one.read(digest, len(content)) for digest, content in zip(digests, contents, strict=True)
    ] == contents
    assert one.tier.used_bytes == on_disk(folder)
    one.tier.close()
    two = Tier(folder, 4 * UNIT_BYTES)
    assert [
        two.read(digest, len(content)) for digest, content in zip(digests, contents, strict=True)
    ] == contents
    assert two.tier.used_bytes == on_disk(folder)
    assert two.events == {DiskEvent.READ: 4}
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*.chunk")} == {0o600}


def test_a_read_goes_on_where_another_origin_broke_off(folder: Path):
    one = Tier(folder, 8 * UNIT_BYTES)
    content = content_of(1, 2 * UNIT_BYTES + 64)
    digest = one.store(content)
    assert read_by(one.tier, digest, len(content), content[: UNIT_BYTES + 77]) == content


def test_a_chunk_that_is_not_there_is_no_fault(folder: Path):
    one = Tier(folder)
    with pytest.raises(NotHere):
        one.read(chunk_digest(b"x"), 1)
    assert DiskOrigin(one.tier).origins(None, None) == ()
    one.store(content_of(1))
    assert [origin.kind for origin in DiskOrigin(one.tier).origins(None, None)] == [OriginKind.DISK]


@pytest.mark.parametrize(
    "damage", ["torn", "longer", "other", "empty", "gone", "a folder", "a link"]
)
@pytest.mark.parametrize("restarted", [False, True])
def test_a_damaged_file_is_found_out_and_removed(
    folder: Path, damage: str, restarted: bool, tmp_path: Path
):
    one = Tier(folder)
    content = content_of(1)
    digest, other = one.store(content), one.store(content_of(2))
    path = file_of(folder, digest)
    match damage:
        case "torn":
            path.write_bytes(content[:1000])
        case "longer":
            path.write_bytes(content + b"x")
        case "other":
            path.write_bytes(content[:-1] + b"\0")
        case "empty":
            path.write_bytes(b"")
        case "gone":
            path.unlink()
        case "a folder":
            path.unlink()
            path.mkdir()
        case _:
            path.rename(tmp_path / "elsewhere")
            path.symlink_to(tmp_path / "elsewhere")
    if restarted:
        one.tier.close()
        one = Tier(folder)
    with pytest.raises(NotHere):
        one.read(digest, len(content))
    assert digest not in one.tier
    assert not path.is_file() or path.is_symlink()
    assert one.read(other, len(content)) == content_of(2), "the others are as good as before"
    assert one.tier.used_bytes == BLOCK_BYTES
    if damage not in ("a folder", "a link"):
        assert one.store(content) == digest
        assert one.read(digest, len(content)) == content


def test_bytes_that_others_gave_wrongly_cost_no_file(folder: Path):
    """One cannot tell whose bytes were wrong; read alone, the file shows that it is sound."""
    one = Tier(folder)
    content = content_of(1)
    digest = one.store(content)
    with pytest.raises(MixedBytes):
        read_by(one.tier, digest, len(content), b"wrong")
    assert one.read(digest, len(content)) == content


def test_unfinished_files_are_never_read_and_removed_at_the_next_start(folder: Path):
    one = Tier(folder)
    content = content_of(1)
    digest = chunk_digest(content)
    path = file_of(folder, digest).with_suffix(".part")

    def breaks():
        yield memoryview(content[:1000])
        assert path.stat().st_size == 1000
        assert on_disk(folder) <= one.tier.used_bytes
        raise Unwritten

    with pytest.raises(Unwritten):
        one.tier.write(digest, len(content), breaks())
    assert not path.exists()
    assert (one.tier.used_bytes, digest in one.tier) == (0, False)
    one.tier.close()
    path.write_bytes(content)
    (folder / "notes.txt").write_text("not ours")
    two = Tier(folder)
    assert digest not in two.tier
    assert not path.exists()
    assert (folder / "notes.txt").exists()


def test_the_least_recently_used_go_first_also_after_a_restart(folder: Path):
    one = Tier(folder, 3 * BLOCK_BYTES)
    digests = [one.store(content_of(seed)) for seed in range(3)]
    for at_s, digest in enumerate(digests):
        os.utime(file_of(folder, digest), (at_s, at_s))
    one.read(digests[0], 3 * KIB)
    one.tier.close()
    two = Tier(folder, 3 * BLOCK_BYTES)
    newest = two.store(content_of(9))
    assert [digest in two.tier for digest in (*digests, newest)] == [True, False, True, True]
    assert two.events[DiskEvent.EVICTED] == 1
    two.tier.close()
    smaller = Tier(folder, BLOCK_BYTES)
    assert on_disk(folder) == smaller.tier.used_bytes == BLOCK_BYTES
    with pytest.raises(Unwritten):
        smaller.store(content_of(1, BLOCK_BYTES + 1))


class Limited(RuleBasedStateMachine):
    """Whatever is stored, read, damaged and restarted: the files stay below the limit, and only
    right bytes come back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.limit = 6 * BLOCK_BYTES
        self.one = Tier(self.folder, self.limit)
        self.known: dict[Digest, bytes] = {}

    @rule(seed=st.integers(0, 12), size=st.sampled_from([64, 4096, 4160, 9000, 24_000, 30_000]))
    def store(self, seed: int, size: int) -> None:
        content = content_of(seed, size)
        self.known[chunk_digest(content)] = content
        with contextlib.suppress(Unwritten):
            self.one.store(content)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        digest = data.draw(st.sampled_from(sorted(self.known)))
        with contextlib.suppress(NotHere):
            assert self.one.read(digest, len(self.known[digest])) == self.known[digest]

    @precondition(lambda self: self.known)
    @rule(data=st.data(), size=st.integers(0, 5000))
    def damage(self, data: st.DataObject, size: int) -> None:
        path = file_of(self.folder, data.draw(st.sampled_from(sorted(self.known))))
        if path.exists():
            os.truncate(path, min(size, path.stat().st_size))

    @rule(blocks=st.integers(1, 8))
    def restart(self, blocks: int) -> None:
        self.one.tier.close()
        self.limit = blocks * BLOCK_BYTES
        self.one = Tier(self.folder, self.limit)

    @invariant()
    def within_the_limit(self) -> None:
        assert on_disk(self.folder) <= self.one.tier.used_bytes <= self.limit

    def teardown(self) -> None:
        self.one.tier.close()
        self.stack.close()


TestLimited = Limited.TestCase
TestLimited.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLimited.pytestmark = [pytest.mark.slow]


def test_one_loader_a_folder(folder: Path):
    one = Tier(folder)
    with pytest.raises(DiskTierTaken, match="another loader uses the disk tier"):
        Tier(folder)
    one.tier.close()
    Tier(folder)


def test_a_folder_that_is_deleted_is_made_anew_and_locked(folder: Path):
    one = Tier(folder)
    content = content_of(1)
    digest = one.store(content)
    subprocess.run(["rm", "-r", folder], check=True, timeout=10)
    with pytest.raises(NotHere):
        one.read(digest, len(content))
    assert one.store(content) == digest
    assert one.read(digest, len(content)) == content
    assert one.tier.used_bytes == on_disk(folder) == BLOCK_BYTES
    with pytest.raises(DiskTierTaken):
        Tier(folder)


def test_a_folder_that_somebody_else_made_anew_is_theirs(folder: Path):
    one = Tier(folder)
    subprocess.run(["rm", "-r", folder], check=True, timeout=10)
    theirs = Tier(folder)
    with pytest.raises(Unwritten):
        one.store(content_of(1))
    assert one.tier.is_off
    theirs.tier.close()
    one.clock.advance(RETRY_S)
    one.store(content_of(1))


def test_no_folder_is_no_tier_until_there_is_one(tmp_path: Path):
    (tmp_path / "file").write_text("in its place")
    one = Tier(tmp_path / "file" / "tier")
    assert one.tier.is_off
    with pytest.raises(Unwritten):
        one.store(content_of(1))
    (tmp_path / "file").unlink()
    with pytest.raises(Unwritten):
        one.store(content_of(1))
    one.clock.advance(RETRY_S)
    assert one.read(one.store(content_of(1)), 3 * KIB) == content_of(1)


PROGRAM = f"""
import random, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("under", {__file__!r})
test = module_from_spec(spec)
spec.loader.exec_module(test)
test.{{call}}
"""


def on_a_full_disk(folder: Path) -> None:
    one = Tier(folder, 1 << 30)
    contents = [content_of(seed, 256 * KIB) for seed in range(20)]
    stored: list[Digest] = []
    try:
        for content in contents:
            stored.append(one.store(content))  # noqa: PERF401 - the ones before it count when one fails
    except Unwritten:
        pass
    assert 2 < len(stored) < 5
    assert one.tier.is_off
    assert not list(folder.rglob("*.part"))
    assert [one.read(digest, 256 * KIB) for digest in stored] == contents[: len(stored)]
    file_of(folder, stored[0]).unlink()
    one.clock.advance(RETRY_S)
    assert one.store(contents[19])


def on_a_read_only_disk(folder: Path) -> None:
    one = Tier(folder)
    assert one.tier.is_off
    with pytest.raises(Unwritten):
        one.store(content_of(1))
    with pytest.raises(NotHere):
        one.read(chunk_digest(b"x"), 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "call"), [("1100k", "on_a_full_disk"), ("ro", "on_a_read_only_disk")]
)
def test_a_disk_that_is_full_or_read_only_turns_it_off_for_a_while(
    tmp_path: Path, how: str, call: str
):
    program = PROGRAM.format(call=f"{call}(test.Path({str(tmp_path)!r}) / 'tier')")
    program = f"import sys; sys.path[:0] = {[path for path in sys.path if path]!r}\n" + program
    done = run_python(program, {tmp_path: how})
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_kill_at_any_instant_leaves_whole_files_and_ignored_ones(folder: Path):
    rng, limit = random.Random(5), 40 * BLOCK_BYTES
    contents = [disk_content(seed, size) for seed in range(DISK_CONTENTS) for size in DISK_SIZES]
    known = {chunk_digest(content): content for content in contents}
    found = unfinished = 0
    for seed in range(600):
        if seed >= 60 and found > 100 and unfinished:
            # Where processors are short, a process may be killed before it has written anything.
            break
        process = started(store_for_ever, folder, limit, seed)
        assert killed(process, rng.uniform(0.0, 0.03))
        unfinished += bool(list(folder.rglob("*.part")))
        one = Tier(folder, limit)
        assert not list(folder.rglob("*.part"))
        assert one.tier.used_bytes == on_disk(folder) <= limit
        for path in folder.rglob("*.chunk"):
            digest = Digest(path.stem)
            assert one.read(digest, len(known[digest])) == known[digest]
            found += 1
        assert not one.events[DiskEvent.DAMAGED]
        one.tier.close()
    assert found > 100
    assert unfinished, "no process was killed while it wrote"
