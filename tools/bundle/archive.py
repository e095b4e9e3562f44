"""Archives whose bytes depend on their content alone, in parts that fit a small transfer.

An archive is a tar file, compressed as a row of xz streams (which `xz -d` and Python read as one
file) and cut into parts. Wheels are put in unpacked, as zip files without compression: one
compression over all of them takes a third less than their own.
"""

import hashlib
import lzma
import os
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

MIB = 1024 * 1024
PART_BYTES = 28 * MIB
BLOCK_BYTES = 64 * MIB
"""What one xz stream holds: compressed on a core of its own, and the farthest that a repetition is
found."""
EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip file can tell."""
FILTERS = [
    {"id": lzma.FILTER_X86},
    {"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": BLOCK_BYTES},
]
"""Most of the bytes are machine code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One file of an archive."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """What the manifest says of one archive. The parts' names sort in their order."""

    name: str
    size_bytes: int
    sha256: str
    unpacked_bytes: int
    parts: tuple[Part, ...]


def write_archive(
    name: str, stem: str, entries: Mapping[str, Path], folder: Path, part_bytes: int = PART_BYTES
) -> Archive:
    """Write ``folder/stem.tar.xz.00`` and so on from files by their names in the archive."""
    with tempfile.TemporaryFile(dir=folder) as plain:
        with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for target, source in sorted(entries.items()):
                with source.open("rb") as content:
                    tar.addfile(_member(target, source), content)
        size_bytes = plain.tell()
        plain.flush()  # blocks are read past Python's buffer
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            offsets = range(0, size_bytes, BLOCK_BYTES)
            blocks = pool.map(_compressed, repeat(plain.fileno()), offsets, repeat(size_bytes))
            compressed = b"".join(blocks)
    pieces = [
        compressed[start : start + part_bytes] for start in range(0, len(compressed), part_bytes)
    ]
    parts: list[Part] = []
    for number, piece in enumerate(pieces):
        part = Part(
            name=f"{stem}.tar.xz.{number:02d}",
            size_bytes=len(piece),
            sha256=hashlib.sha256(piece).hexdigest(),
        )
        (folder / part.name).write_bytes(piece)
        parts.append(part)
    return Archive(
        name=name,
        size_bytes=len(compressed),
        sha256=hashlib.sha256(compressed).hexdigest(),
        unpacked_bytes=sum(source.stat().st_size for source in entries.values()),
        parts=tuple(parts),
    )


def store_wheel(wheel: Path, folder: Path) -> Path:
    """Write the wheel again, its files in order, undated and without compression; what they hold,
    and RECORD, stay as they are.
    """
    stored = folder / wheel.name
    with (
        zipfile.ZipFile(wheel) as source,
        zipfile.ZipFile(stored, "w", zipfile.ZIP_STORED) as target,
    ):
        for info in sorted(source.infolist(), key=lambda info: info.filename):
            if info.is_dir():
                continue
            plain = zipfile.ZipInfo(info.filename, EPOCH)
            plain.external_attr = info.external_attr
            target.writestr(plain, source.read(info))
    return stored


def files_below(folder: Path, target: str) -> dict[str, Path]:
    """Every file of a folder, but what Python or an editor left there, by its name in an
    archive.
    """
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if path.is_file() and not any(
            word == "__pycache__" or word.startswith(".") for word in relative.parts
        ):
            found[f"{target}/{relative.as_posix()}"] = path
    return found


def _member(target: str, source: Path) -> tarfile.TarInfo:
    info = tarfile.TarInfo(target)
    info.size = source.stat().st_size
    info.mode = 0o755 if os.access(source, os.X_OK) else 0o644
    return info


def _compressed(descriptor: int, offset: int, end: int) -> bytes:
    block = os.pread(descriptor, min(BLOCK_BYTES, end - offset), offset)
    return lzma.compress(block, format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC32, filters=FILTERS)
