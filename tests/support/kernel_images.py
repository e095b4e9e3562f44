"""Kernel images, read apart from what prunes them."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

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
    """Its sections and symbols, by names."""

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
