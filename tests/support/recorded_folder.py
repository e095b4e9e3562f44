"""A folder of a recording: an archive of graphs with what its addresses point to, the traces of
three processes that did the same work, and whole images of the archive's kernels.

::

    about.json          what was recorded where, by which versions, and a digest of each file
    archive.xz          the first process' graphs, their images pruned, with a table of addresses
    ours.json.xz        the trace of that process
    witness.json.xz     of a second one, whose arena lies elsewhere: with it addresses were found
    third.json.xz       of a third one, whose segments fall out otherwise: what they must foretell
    image-0.xz ...      images as the driver had them, with kernels that no graph uses
"""

import hashlib
import json
import lzma
import struct
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graph_archives import HEADER, KERNEL_ENTRY

from pilotlight.common.messages.codec import decode_json, encode_json
from pilotlight.engine.cuda.traces import trace_of
from pilotlight.native.pointers import nodes_of, pointers_of, tags_of
from pilotlight.policy.graphs.trace import Trace

FORMAT, MOST_BYTES = 1, 2 << 20
MOST_TIMES_SMALLER = 16
ABOUT, ARCHIVE = "about.json", "archive"
PROCESSES = ("ours", "witness", "third")


class NotWhole(Exception):
    """A folder lacks a file, or has another one than was recorded."""


@dataclass(frozen=True)
class Recording:
    """What a folder has."""

    about: Mapping[str, Any]
    archive: bytes
    traces: Mapping[str, Trace]
    """By process."""
    images: Mapping[bytes, tuple[str, ...]]
    """Whole ones, and those of their kernels that the archive has."""


def write(
    folder: Path,
    archives: Mapping[str, bytes],
    whole: bytes,
    facts: Mapping[str, Any],
    most_bytes: int = MOST_BYTES,
) -> None:
    """Writes a folder of at most so many bytes: of whole images the smallest come first, and those
    for which there is no room are told by their kernels.

    Args:
        folder: which is made.
        archives: of each process, with its allocations; the first one's with its addresses.
        whole: the first process' archive, whose images have all kernels.
        facts: of the machine, and of what was recorded.
        most_bytes: of all files as they are written, compressed.

    Raises:
        ValueError: the archive and the traces are longer than that.
    """
    ours = archives["ours"]
    graphs = set(tags_of(ours))
    contents = {ARCHIVE: ours}
    for process in PROCESSES:
        archive = archives[process]
        trace, _ = trace_of(archive, pointers_of(archive), graphs)
        contents[f"{process}.json"] = encode_json(trace)
    packed = {name: lzma.compress(content) for name, content in contents.items()}
    images: dict[str, tuple[str, ...]] = {}
    left_out: list[str] = []
    room = most_bytes - sum(map(len, packed.values()))
    about = {
        "format": FORMAT,
        **facts,
        "graphs": sorted(graphs),
        "nodes": len(list(nodes_of(ours))),
        "allocations": len(pointers_of(ours).allocations),
        "words": len(pointers_of(ours).words),
        "archive_bytes": len(ours),
        "whole_bytes": len(whole),
    }
    by_size = sorted(images_of(whole).items(), key=lambda one: len(one[0]))
    # What is left when all are named bounds what naming some takes.
    room -= len(json.dumps([about, [names for _, names in by_size]])) + 200 * (len(by_size) + 8)
    if room < 0:
        raise ValueError(f"{most_bytes - room} bytes without an image: record fewer sizes")
    for image, names in by_size:
        # What has no chance is not compressed: a library's images have many megabytes.
        short = lzma.compress(image) if len(image) <= MOST_TIMES_SMALLER * room else image
        if len(short) > room:
            left_out += names
            continue
        room -= len(short)
        name = f"image-{len(images)}"
        contents[name], packed[name], images[name] = image, short, names
    about["images"], about["images_left_out"] = images, sorted(left_out)
    about["digests"] = {
        name: hashlib.sha256(content).hexdigest() for name, content in contents.items()
    }
    folder.mkdir(parents=True)
    for name, content in packed.items():
        (folder / f"{name}.xz").write_bytes(content)
    (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n")


def read(folder: Path) -> Recording:
    """What was written.

    Raises:
        NotWhole: something of it is not there, or not what was recorded.
    """
    about = json.loads((folder / ABOUT).read_text())
    contents: dict[str, bytes] = {}
    for name, digest in about["digests"].items():
        try:
            contents[name] = lzma.decompress((folder / f"{name}.xz").read_bytes())
        except (OSError, lzma.LZMAError) as error:
            raise NotWhole(f"{name}: {error}") from error
        if hashlib.sha256(contents[name]).hexdigest() != digest:
            raise NotWhole(f"{name} is not what was recorded")
    return Recording(
        about,
        contents[ARCHIVE],
        {name: decode_json(contents[f"{name}.json"], Trace) for name in PROCESSES},
        {contents[name]: tuple(names) for name, names in about["images"].items()},
    )


def images_of(archive: bytes) -> dict[bytes, tuple[str, ...]]:
    """The images of an archive that holds together, and which of their kernels it has."""
    _, num_images, num_kernels, _, _, images, kernels, *_ = struct.unpack_from(HEADER, archive)
    places = [struct.unpack_from("<2Q", archive, images + 16 * one) for one in range(num_images)]
    names: dict[bytes, list[str]] = defaultdict(list)
    size = struct.calcsize(KERNEL_ENTRY)
    for number in range(num_kernels):
        name, _, image, *_ = struct.unpack_from(KERNEL_ENTRY, archive, kernels + number * size)
        if image < num_images:
            start, num_bytes = places[image]
            text = archive[name : archive.index(0, name)].decode()
            names[archive[start : start + num_bytes]].append(text)
    return {image: tuple(found) for image, found in names.items()}
