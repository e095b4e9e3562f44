"""Recordings of graphs: by three processes over the fake driver, which the recorder makes here, and
those of devices, in folders that lie in ``data/recorded`` (``tests/support/graph_recorder.py``).

Archives are read, addresses are matched with what they point to, images are pruned; what the third
process had is the truth.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import graph_recorder
import pytest
import recorded_folder
from graph_archives import GRAPH, HEADER, NODE
from kernel_images import Image
from recorded_folder import MOST_BYTES, NotWhole, Recording, images_of

from pilotlight.common.messages.codec import encode_json
from pilotlight.engine.cuda.traces import trace_of
from pilotlight.native.device import DeviceArena
from pilotlight.native.graphs import prune_image
from pilotlight.native.library import NativeError
from pilotlight.native.pointers import (
    PointerTable,
    Word,
    check_pointers,
    moved,
    nodes_of,
    pointers_of,
    tags_of,
    with_pointers,
)
from pilotlight.policy.graphs.matching import Matching, match, require_certain, restored
from pilotlight.policy.graphs.settling import settled
from pilotlight.policy.graphs.trace import WORD_BYTES, Launch, Trace, TraceRefused, check_trace

FOLDERS = Path(__file__).parent / "data" / "recorded"
NAMES = ["fake", *sorted(folder.name for folder in FOLDERS.glob("*") if folder.is_dir())]
ELSEWHERE = 0x2345_6780_0000
TABLE, ALLOCATION, WORD = struct.Struct("<8s2I4Q"), struct.Struct("<3Q4I"), struct.Struct("<2Q2I")


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param != "fake":
        return FOLDERS / request.param
    made = tmp_path_factory.mktemp("recorded") / "fake"
    graph_recorder.main(["fake", str(made)])
    return made


@pytest.fixture(scope="module")
def recorded(folder: Path) -> Recording:
    return recorded_folder.read(folder)


@pytest.fixture(scope="module")
def matched(recorded: Recording) -> Matching:
    ours, witness = recorded.traces["ours"], recorded.traces["witness"]
    found = settled(ours, [witness], match(ours, [witness]))
    require_certain(found)
    return found


def captured(trace: Trace) -> Iterator[tuple[int, Launch]]:
    return ((number, one) for number, one in enumerate(trace.launches) if one.graph is not None)


def test_a_folder_says_what_was_recorded_and_is_small(folder: Path, recorded: Recording) -> None:
    about = recorded.about
    assert sum(file.stat().st_size for file in folder.iterdir()) <= MOST_BYTES
    assert about["source"]
    assert about["device"]
    assert recorded.images, "there is something to prune"
    assert len(recorded.archive) == about["archive_bytes"]


def test_an_archive_is_read_as_the_process_had_it(recorded: Recording) -> None:
    archive, about, ours = recorded.archive, recorded.about, recorded.traces["ours"]
    assert sorted(tags_of(archive)) == about["graphs"]
    nodes = list(nodes_of(archive))
    table = pointers_of(archive)
    assert (len(nodes), len(table.allocations), len(table.words)) == (
        about["nodes"],
        about["allocations"],
        about["words"],
    )
    trace, places = trace_of(archive, table)
    assert encode_json(trace) == encode_json(ours)
    assert sorted(places) == sorted(node.place for node in nodes)
    for one in recorded.traces.values():
        check_trace(one)


def test_a_table_holds_what_matching_finds(recorded: Recording, matched: Matching) -> None:
    archive = recorded.archive
    table = pointers_of(archive)
    _, places = trace_of(archive, table)
    found = {
        Word(places[number] + one.offset, one.allocation, one.inside)
        for number, pointers in matched.pointers.items()
        for one in pointers
    }
    assert found == {*table.words}
    assert len(found) > 0


def candidates(ours: Trace, third: Trace, number: int, offset: int) -> tuple[Any, Any]:
    """Allocations that live, and of which the third process' word is as far from the beginning: the
    word lies within them, or just behind.
    """
    launch, other = ours.launches[number], third.launches[number]
    word, there = launch.word(offset), other.word(offset)
    within: set[tuple[int, int]] = set()
    behind: set[tuple[int, int]] = set()
    for index, (one, its) in enumerate(zip(ours.allocations, third.allocations, strict=True)):
        inside = word - one.address
        if one.lives(launch.at) and there - its.address == inside:
            if one.holds(word):
                within.add((index, inside))
            elif inside == one.num_bytes:
                behind.add((index, inside))
    return within, behind


def test_every_pointer_has_the_index_that_a_third_process_knows(
    recorded: Recording, matched: Matching
) -> None:
    """By looking at all allocations, apart from how matching goes about it."""
    ours, third = recorded.traces["ours"], recorded.traces["third"]
    known = 0
    for number, launch in captured(ours):
        found = {one.offset: one for one in matched.pointers.get(number, ())}
        for param in ours.layouts[launch.kernel]:
            for offset in param.words:
                within, behind = candidates(ours, third, number, offset)
                one = found.get(offset)
                told = None if one is None else (one.allocation, one.inside)
                if within:
                    assert within == {told}, f"word {offset} of launch {number}"
                    known += 1
                else:
                    assert told is None or told in behind, f"word {offset} of launch {number}"
    assert known > 0


def test_the_third_process_parameters_are_foretold(recorded: Recording, matched: Matching) -> None:
    ours, third = recorded.traces["ours"], recorded.traces["third"]
    changed = 0
    for number, launch in captured(ours):
        made = restored(launch, matched.pointers.get(number, ()), third.allocations)
        true = third.launches[number]
        changed += made != launch.parameters
        for offset in range(0, len(made) - WORD_BYTES + 1, WORD_BYTES):
            words = replace(launch, parameters=made).word(offset), true.word(offset)
            dead = not any(one.holds(word) for one in third.allocations for word in words)
            assert words[0] == words[1] or dead, f"word {offset} of launch {number}"
    assert changed > 0, "the addresses are others there"


def test_what_had_an_address_before_is_not_taken_for_its_owner(
    recorded: Recording, matched: Matching
) -> None:
    """MEDUSA's Figure 6: the first that had an address lies elsewhere in the third process."""
    ours, third = recorded.traces["ours"], recorded.traces["third"].allocations
    confused = 0
    for number, pointers in matched.pointers.items():
        launch = ours.launches[number]
        for one in pointers:
            word = launch.word(one.offset)
            holding = [index for index, at in enumerate(ours.allocations) if at.holds(word)]
            first = holding[0] if holding else one.allocation
            if first != one.allocation:
                naive = replace(
                    one, allocation=first, inside=word - ours.allocations[first].address
                )
                confused += restored(launch, [naive], third) != restored(launch, [one], third)
    assert confused > 0 or recorded.about["device"] != "none", "the fake's allocator does so"


def test_images_keep_their_kernels_and_these_their_bytes(recorded: Recording) -> None:
    """The archive has what pruning leaves of the whole image, or that where it was not taken."""
    archived, smaller = images_of(recorded.archive), 0
    for whole, kernels in recorded.images.items():
        try:
            pruned = prune_image(whole, kernels)
        except NativeError:
            assert whole in archived, kernels
            continue
        smaller += len(pruned) < len(whole)
        assert any(one in archived for one in (pruned, whole)), kernels
        before = {one.name: one for one in Image(whole).sections}
        after = {one.name: one for one in Image(pruned).sections}
        assert {name for name in kernels if f".text.{name}" not in after} == set()
        for name, section in after.items():
            if name.startswith((".text.", ".nv.constant")):
                assert section.body == before[name].body, name
        used = {symbol for symbol, info, *_ in Image(pruned).symbols if info == 0x12}
        assert {*kernels} <= used
    assert smaller > 0


def test_a_recording_is_written_for_an_arena_elsewhere(recorded: Recording) -> None:
    archive = recorded.archive
    table = pointers_of(archive)
    first = min(one.address for one in table.allocations)
    num_bytes = max(one.address + one.num_bytes for one in table.allocations) - first
    arena = cast("DeviceArena", SimpleNamespace(address=ELSEWHERE, num_bytes=num_bytes))
    bases = [one.address - first + ELSEWHERE for one in table.allocations]
    made = moved(archive, bases, arena)
    for word in table.words:
        assert int.from_bytes(made[word.place : word.place + WORD_BYTES], "little") == (
            bases[word.allocation] + word.inside
        )
    with pytest.raises(NativeError, match="outside of the arena"):
        moved(archive, [base + num_bytes for base in bases], arena)


def cut(archive: bytearray) -> None:
    del archive[-64:]


def other_format(archive: bytearray) -> None:
    archive[7] ^= 1


def node_without_kernel(archive: bytearray) -> None:
    """The first graph's first kernel node has one that the archive lacks."""
    _, _, num_kernels, _, _, _, _, graphs, *_ = struct.unpack_from(HEADER, archive)
    _, nodes, *_ = struct.unpack_from(GRAPH, archive, graphs)
    at = nodes
    while struct.unpack_from("<I", archive, at)[0]:
        at += struct.calcsize(NODE)
    struct.pack_into("<I", archive, at + 4, num_kernels)


def graph_beyond(archive: bytearray) -> None:
    """The first graph's nodes begin behind the archive."""
    graphs = struct.unpack_from(HEADER, archive)[7]
    struct.pack_into("<Q", archive, graphs + 8, len(archive) + 16)


def word_of_nothing(archive: bytearray) -> None:
    """The first word of the table is of an allocation that there is not."""
    at = struct.unpack_from("<I", archive, 20)[0] * 16
    _, allocations, _, _, _, _, words = TABLE.unpack_from(archive, at)
    struct.pack_into("<I", archive, words + 16, allocations)


def word_behind(archive: bytearray) -> None:
    """The first word of the table points beyond its allocation."""
    at = struct.unpack_from("<I", archive, 20)[0] * 16
    _, _, _, _, allocations, _, words = TABLE.unpack_from(archive, at)
    number = struct.unpack_from("<I", archive, words + 16)[0]
    _, num_bytes, *_ = ALLOCATION.unpack_from(archive, allocations + number * ALLOCATION.size)
    struct.pack_into("<Q", archive, words + 8, num_bytes + 1)


@pytest.mark.parametrize(
    "mutate",
    [cut, other_format, node_without_kernel, graph_beyond, word_of_nothing, word_behind],
)
def test_a_mutated_archive_is_refused(
    recorded: Recording, mutate: Callable[[bytearray], None]
) -> None:
    archive = bytearray(recorded.archive)
    mutate(archive)
    assert archive != recorded.archive
    with pytest.raises(NativeError):
        check_pointers(bytes(archive))


def test_an_address_that_is_another_is_in_doubt(recorded: Recording, matched: Matching) -> None:
    """A word of an address moved by a page, in one process of two."""
    ours, witness = recorded.traces["ours"], recorded.traces["witness"]
    number, (one, *_) = next(iter(matched.pointers.items()))
    launch = ours.launches[number]
    parameters = bytearray(launch.parameters)
    word = (launch.word(one.offset) + 4096).to_bytes(WORD_BYTES, "little")
    parameters[one.offset : one.offset + WORD_BYTES] = word
    launches = [*ours.launches]
    launches[number] = replace(launch, parameters=bytes(parameters))
    changed = replace(ours, launches=launches)
    found = settled(changed, [witness], match(changed, [witness]))
    assert [(doubt.launch, doubt.offset) for doubt in found.doubts] == [(number, one.offset)]
    with pytest.raises(TraceRefused, match=f"word {one.offset} of "):
        require_certain(found)


def test_a_folder_that_was_changed_is_refused(folder: Path, tmp_path: Path) -> None:
    for name in ("archive.xz", "third.json.xz"):
        copy = tmp_path / name
        copy.mkdir()
        for file in folder.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
        (copy / name).write_bytes((folder / "witness.json.xz").read_bytes())
        with pytest.raises(NotWhole, match="is not what was recorded"):
            recorded_folder.read(copy)
        (copy / name).unlink()
        with pytest.raises(NotWhole, match="No such file"):
            recorded_folder.read(copy)


def test_what_there_is_no_room_for_is_told_by_its_kernels(
    recorded: Recording, tmp_path: Path
) -> None:
    table = pointers_of(recorded.archive)
    bare = with_pointers(recorded.archive, PointerTable(table.allocations, table.captures))
    archives = {"ours": recorded.archive, "witness": bare, "third": bare}
    recorded_folder.write(tmp_path / "all", archives, recorded.archive, {})
    files = (tmp_path / "all").iterdir()
    without = sum(file.stat().st_size for file in files if "image" not in file.name)
    room = 400 * (len(images_of(recorded.archive)) + 8)
    few = tmp_path / "few"
    recorded_folder.write(few, archives, recorded.archive, {}, without + room)
    assert sum(file.stat().st_size for file in few.iterdir()) <= without + room
    with pytest.raises(ValueError, match="record fewer sizes"):
        recorded_folder.write(tmp_path / "none", archives, recorded.archive, {}, without // 2)
    told = recorded_folder.read(few).about
    known = sorted(name for names in images_of(recorded.archive).values() for name in names)
    named = [name for names in told["images"].values() for name in names]
    assert sorted([*named, *told["images_left_out"]]) == known
