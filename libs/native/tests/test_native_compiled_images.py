"""Images by NVIDIA's compilers, pruned: what is kept names what it named before, by names."""

from itertools import combinations
from pathlib import Path

import pytest
from kernel_images import ALLOCATED, NO_BITS, Image

from pilotlight.native.graphs import prune_image

IMAGES = sorted((Path(__file__).parent / "images").glob("*.cubin"))
KERNELS = ("plain", "shares", "jumps", "calls", "other")
KEPT = [*combinations(KERNELS, 1), *combinations(KERNELS, 2), KERNELS]


@pytest.mark.parametrize("kept", KEPT, ids=" ".join)
@pytest.mark.parametrize("file", IMAGES, ids=lambda file: file.stem)
def test_what_is_kept_names_what_it_named(file: Path, kept: tuple[str, ...]) -> None:
    data = file.read_bytes()
    before, after = Image(data), Image(prune_image(data, kept))
    gone = {name for name in KERNELS if name not in kept}
    by_name = {section.name: section for section in before.sections}
    assert [section.name for section in after.sections] == [
        section.name
        for section in before.sections
        if section.name.rpartition(".")[2] not in gone and section.name != ".rela.debug_frame"
    ]
    for section in after.sections:
        assert after.described(section) == before.described(by_name[section.name]), section.name
    names = [symbol[0] for symbol in after.symbols]
    assert not gone & {name.rpartition(".")[2] for name in names}
    assert set(kept) <= set(names)
    (of_all,) = (section for section in after.sections if section.name == ".nv.info")
    assert list(after.notes(of_all.body)) == [
        note for note in before.notes(by_name[".nv.info"].body) if note[1] in after.symbols
    ]


@pytest.mark.parametrize("kept", KEPT, ids=" ".join)
@pytest.mark.parametrize("file", IMAGES, ids=lambda file: file.stem)
def test_segments_hold_what_they_held(file: Path, kept: tuple[str, ...]) -> None:
    """The driver loads segments: each has all of its sections, and memory for those without
    bytes.
    """
    image = Image(prune_image(file.read_bytes(), kept))
    for kind, _, start, _, _, num_bytes, memory_bytes, _ in image.segments[:2]:
        assert kind in (1, 6)
        assert (start, num_bytes, memory_bytes) == (image.table, *[56 * image.num_segments] * 2)
    shared_bytes = 0
    for section in image.sections:
        if not section.flags & ALLOCATED or not section.num_bytes:
            continue
        if section.kind == NO_BITS:
            shared_bytes += section.num_bytes
            continue
        held = [
            start
            for kind, _, start, _, _, num_bytes, _, _ in image.segments[2:]
            if start <= section.start and section.start + section.num_bytes <= start + num_bytes
        ]
        assert len(held) == 1, section.name
        assert section.start % section.align == 0
    assert sum(memory - in_file for *_, in_file, memory, _ in image.segments) == shared_bytes
    assert all(memory for *_, memory, _ in image.segments)
    if len(kept) == len(KERNELS):
        original = Image(file.read_bytes())
        assert [segment[5:] for segment in image.segments] == [
            segment[5:] for segment in original.segments
        ]
