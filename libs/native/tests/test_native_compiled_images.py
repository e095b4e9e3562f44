"""Images by NVIDIA's compilers, pruned: what is kept names what it named before, by names."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import pytest

from pilotlight.native.graphs import prune_image

IMAGES = sorted((Path(__file__).parent / "images").glob("*.cubin"))
KERNELS = ("plain", "shares", "jumps", "calls", "other")
KEPT = [*combinations(KERNELS, 1), *combinations(KERNELS, 2), KERNELS]
SYMBOLS, RELA, NO_BITS, NV_INFO = 2, 4, 8, 0x70000000
ALLOCATED, NAMES_SECTION = 2, 0x40
BY_KERNEL, BY_BANK = (0x2F, 0x11, 0x12, 0x23), 0x0A
REWRITTEN = {".shstrtab", ".strtab", ".symtab", ".debug_frame", ".nv.info"}
"""Sections whose contents are fewer when kernels go."""


@dataclass(frozen=True)
class Section:
    name: str
    kind: int
    flags: int
    start: int
    num_bytes: int
    link: int
    info: int
    align: int
    body: bytes


class Image:
    """Read apart from what prunes it."""

    def __init__(self, data: bytes) -> None:
        fields = struct.unpack_from("<HHIQQQIHHHHHH", data, 16)
        self.table, self.num_segments = fields[4], fields[9]
        self.segments = [
            struct.unpack_from("<IIQQQQQQ", data, self.table + 56 * number)
            for number in range(self.num_segments)
        ]
        heads = [
            struct.unpack_from("<IIQQQQIIQQ", data, fields[5] + 64 * number)
            for number in range(fields[11])
        ]
        names = heads[fields[12]][4]
        self.sections = [
            Section(
                data[names + head[0] : data.index(b"\0", names + head[0])].decode(),
                *(head[1], head[2], head[4], head[5], head[6], head[7], head[8]),
                b"" if head[1] in (0, NO_BITS) else data[head[4] : head[4] + head[5]],
            )
            for head in heads
        ]
        table = next(section for section in self.sections if section.kind == SYMBOLS)
        strings = self.sections[table.link].body
        self.symbols = [
            (strings[name : strings.index(b"\0", name)].decode(), info, other, self.named(section))
            for name, info, other, section, _, _ in struct.iter_unpack("<IBBHQQ", table.body)
        ]

    def named(self, section: int) -> str:
        return self.sections[section].name if section < 0xFF00 else f"special {section}"

    def described(self, section: Section) -> tuple[object, ...]:
        """A section, with names in the place of numbers."""
        owner: object = section.info
        if section.name.startswith(".text."):
            owner = self.symbols[section.info & 0xFFFFFF], section.info >> 24
        elif section.kind == RELA or section.flags & NAMES_SECTION:
            owner = self.named(section.info)
        content: object = section.body if section.name not in REWRITTEN else b""
        if section.kind == NV_INFO and section.name != ".nv.info":
            content = list(self.notes(section.body))
        elif section.kind == SYMBOLS:
            owner = ""
        elif section.kind == RELA:
            content = [
                (place, self.symbols[info >> 32], info & 0xFFFFFFFF, addend)
                for place, info, addend in struct.iter_unpack("<QQq", section.body)
            ]
        same = section.kind, section.flags, self.named(section.link), section.align
        return *same, owner, content

    def notes(self, body: bytes) -> Iterator[tuple[object, ...]]:
        """A kernel's, and all of the image's in ``.nv.info``."""
        at = 0
        while at < len(body):
            form, kind, length = struct.unpack_from("<BBH", body, at)
            content = body[at + 4 : at + 4 + length] if form == 4 else b""
            at += 4 + len(content)
            if kind in (*BY_KERNEL, BY_BANK) and form == 4:
                yield kind, self.symbols[struct.unpack_from("<I", content)[0]], content[4:]
            else:
                yield form, kind, length, content


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
