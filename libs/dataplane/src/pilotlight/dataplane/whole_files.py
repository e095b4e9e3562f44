"""Whether what lies in the pool is the files that were registered, where a file's version names its
content.

A range cannot be checked against the digest of a whole file. Once all of a model is in the pool,
every file can::

    file        | header | q     | k   | left out | v     |
    source      |--------|       |     |----------|       |    read again: what no part has
    pool                 |#######|#####|          |#######|    from the parts' images
    hash        |========================================>|    in the file's order; must be what its version names

The header is looked at too: what was registered must be the layout that it tells.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass

from pilotlight.checkpoint.content import ContentHash, names_content
from pilotlight.checkpoint.errors import CheckpointError
from pilotlight.checkpoint.layout import build_manifest
from pilotlight.checkpoint.manifest import Manifest, Segment
from pilotlight.checkpoint.reader import Progress, SourceFile
from pilotlight.checkpoint.safetensors import (
    MAX_HEADER_BYTES,
    StoredTensor,
    header_bytes,
    parse_header,
)
from pilotlight.common.errors import SourceChanged
from pilotlight.dataplane.source_origin import ModelSource

ImageView = Callable[[int, int, int], memoryview]
"""Of a part: bytes from an offset in its image on, and how many; the caller releases them."""

_Placed = tuple[int, Segment]
_HEAD_BYTES = MAX_HEADER_BYTES + 8


def can_be_checked(manifest: Manifest) -> bool:
    """Whether the versions of the files name their content."""
    return all(names_content(file) for file in manifest.files)


@dataclass(frozen=True, slots=True)
class FileCheck:
    """What it takes to check one file. Blocks: runs in a thread."""

    number: int
    file: SourceFile
    placed: Sequence[_Placed]
    """Where its bytes are in the pool, by their order in the file."""

    @classmethod
    def every(cls, manifest: Manifest) -> "tuple[FileCheck, ...]":
        """One for each file."""
        placed: list[list[_Placed]] = [[] for _ in manifest.files]
        for number, part in enumerate(manifest.parts):
            for chunk in part.chunks:
                for segment in chunk.segments:
                    placed[segment.file].append((number, segment))
        for of_file in placed:
            of_file.sort(key=lambda found: found[1].file_offset)
        return tuple(
            cls(number, file, placed[number]) for number, file in enumerate(manifest.files)
        )

    def run(
        self, source: ModelSource, view: ImageView, progress: Progress
    ) -> tuple[StoredTensor, ...]:
        """Hash the whole file; its tensors, as its header tells them.

        Raises:
            SourceChanged: it is another file.
            SourceUnavailable: what is not in the pool cannot be read.
        """
        found, head, end = ContentHash(self.file), bytearray(), 0
        for part, segment in self.placed:
            self._read(source, (end, segment.file_offset), found, head, progress)
            with view(part, segment.image_offset, segment.size_bytes) as data:
                found.update(data)
            progress(segment.size_bytes)
            end = segment.file_offset + segment.size_bytes
        self._read(source, (end, self.file.size_bytes), found, head, progress)
        if not found.agrees:
            raise SourceChanged(
                f"{self.file.name}: the bytes that came do not have the digest that was registered"
            )
        return self._tensors(bytes(head))

    def _read(
        self,
        source: ModelSource,
        missing: tuple[int, int],
        found: ContentHash,
        head: bytearray,
        progress: Progress,
    ) -> None:
        """Bytes [start, stop) from the source; what comes before the first tensor is kept."""
        start, stop = missing
        if start == stop:
            return
        with closing(source.read_range(self.number, start, stop, lambda: progress(0))) as pieces:
            for piece in pieces:
                found.update(piece)
                if start == len(head) < _HEAD_BYTES:
                    head += piece
                start += len(piece)
                progress(len(piece))

    def _tensors(self, head: bytes) -> tuple[StoredTensor, ...]:
        try:
            size_bytes = header_bytes(head, self.file)
            if len(head) >= size_bytes:
                return parse_header(head[:size_bytes], self.file)
        except CheckpointError as error:
            raise SourceChanged(
                f"its header is not the one that was registered: {error}"
            ) from error
        raise SourceChanged(f"{self.file.name}: its header is longer than what was registered")


def check_layout(manifest: Manifest, tensors: Iterable[StoredTensor]) -> None:
    """That the manifest is what the files' headers tell.

    Raises:
        SourceChanged: it is not: what was read at registration was something else.
    """
    try:
        told = build_manifest(
            manifest.spec, manifest.files, {tensor.name: tensor for tensor in tensors}
        )
    except CheckpointError as error:
        raise SourceChanged(f"the headers are not those that were registered: {error}") from error
    if told.digest() != manifest.digest():
        raise SourceChanged("the headers are not those that were registered")
