"""Reading all of a model, file by file in order, and telling the digests of its chunks: what is
compared with what is recorded.

::

    file        | header | q     | k   | left out | v     |     one pass: what names a file's content and what names its chunks is
    content     |========================================>|     computed of the same bytes
    chunks               [chunk 0 ....][chunk 1      ....]

Chunks fill up in the order of the files, because that is how part images are laid out.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field

from pilotlight.checkpoint.content import ContentHash, names_content
from pilotlight.checkpoint.errors import CheckpointError
from pilotlight.checkpoint.manifest import Chunk, Manifest, Segment
from pilotlight.checkpoint.safetensors import (
    MAX_HEADER_BYTES,
    StoredTensor,
    header_bytes,
    parse_header,
)
from pilotlight.common.errors import BadRequest, SourceChanged
from pilotlight.dataplane.chunk_fill import ChunkFill
from pilotlight.dataplane.readers import ReadProgress
from pilotlight.dataplane.source_origin import ModelSource
from pilotlight.dataplane.whole_files import check_layout
from pilotlight.policy.ids import Digest

_HEAD_BYTES = MAX_HEADER_BYTES + 8
_Place = tuple[int, int]
"""A chunk: its part, and its number in it."""


@dataclass(slots=True)
class _Filling:
    fill: ChunkFill
    left: int
    """Segments that have not come yet."""


@dataclass(slots=True, kw_only=True)
class ModelReading:
    """One pass over a model's files.

    ``run`` blocks; broken off, it goes on where it was when it is called again.
    """

    manifest: Manifest
    done_bytes: int = 0
    found: dict[_Place, Digest] = field(default_factory=dict[tuple[int, int], Digest])
    """The digests of the chunks that were read whole."""
    wrong_files: list[str] = field(default_factory=list[str])
    """What is wrong with files whose version names their content."""
    _file: int = 0
    _position: int = 0
    _content: ContentHash | None = None
    _head: bytearray = field(default_factory=bytearray)
    _tensors: list[StoredTensor] = field(default_factory=list[StoredTensor])
    _filling: dict[_Place, _Filling] = field(default_factory=dict[tuple[int, int], _Filling])
    _segments: list[tuple[_Place, Chunk, Segment]] = field(
        default_factory=list[tuple[tuple[int, int], Chunk, Segment]]
    )

    @property
    def total_bytes(self) -> int:
        """Of all files."""
        return sum(file.size_bytes for file in self.manifest.files)

    @property
    def ended(self) -> bool:
        """Every file was read."""
        return self._file == len(self.manifest.files)

    def run(self, source: ModelSource, size_bytes: int, progress: ReadProgress) -> None:
        """Read on, about this many bytes.

        Raises:
            SourceChanged: the source is not what was registered, as its versions tell.
            SourceUnavailable: it cannot be read.
            Abandoned: it is not awaited; ``run`` goes on there.
        """
        until_bytes = self.done_bytes + size_bytes
        while not self.ended and self.done_bytes < until_bytes:
            file = self.manifest.files[self._file]
            stop = min(file.size_bytes, self._position + until_bytes - self.done_bytes)
            if not self._position:
                self._content, self._head = (
                    (ContentHash(file) if names_content(file) else None),
                    bytearray(),
                )
                self._segments = list(self._of_file(self._file))
            with closing(
                source.read_range(self._file, self._position, stop, progress.check)
            ) as pieces:
                for piece in pieces:
                    self._take(piece)
                    progress(len(piece))
            if self._position == file.size_bytes:
                self._end_file()
                self._file, self._position = self._file + 1, 0
        if self.ended:
            self._check_layout()

    def _of_file(self, number: int) -> Iterator[tuple[_Place, Chunk, Segment]]:
        placed = (
            ((p, c), chunk, segment)
            for p, part in enumerate(self.manifest.parts)
            for c, chunk in enumerate(part.chunks)
            for segment in chunk.segments
            if segment.file == number
        )
        # From the end, so that the next one is at hand.
        return iter(sorted(placed, key=lambda one: one[2].file_offset, reverse=True))

    def _take(self, piece: memoryview) -> None:
        if self._content is not None:
            self._content.update(piece)
            if len(self._head) < _HEAD_BYTES:
                self._head += piece[: _HEAD_BYTES - len(self._head)]
        start, end = self._position, self._position + len(piece)
        while self._segments and self._segments[-1][2].file_offset < end:
            place, chunk, segment = self._segments[-1]
            stop = segment.file_offset + segment.size_bytes
            begin = max(start, segment.file_offset)
            with piece[begin - start : min(stop, end) - start] as data:
                self._put(
                    place,
                    chunk,
                    segment.image_offset - chunk.image_offset + begin - segment.file_offset,
                    data,
                )
            if stop > end:
                break
            self._segments.pop()
            self._ended(place, chunk)
        self._position = end
        self.done_bytes += len(piece)

    def _put(self, place: _Place, chunk: Chunk, offset: int, data: memoryview) -> None:
        filling = self._filling.get(place)
        if filling is None:
            fill = ChunkFill(None, chunk.size_bytes, lambda _offset, _data: None)
            filling = self._filling[place] = _Filling(fill, len(chunk.segments))
        work = filling.fill.begin("source", ReadProgress(), trusted=True)
        if offset < work.position:
            raise BadRequest(
                f"chunk {place[1]} of part {place[0]} does not lie in the order of its files: register the model again"
            )
        work.write(bytes(offset - work.position))
        work.write(data)

    def _ended(self, place: _Place, chunk: Chunk) -> None:
        filling = self._filling[place]
        filling.left -= 1
        if not filling.left:
            del self._filling[place]
            work = filling.fill.begin("source", ReadProgress(), trusted=True)
            work.write(bytes(work.left_bytes))
            self.found[place] = filling.fill.found

    def _end_file(self) -> None:
        file = self.manifest.files[self._file]
        if self._content is None:
            return
        if not self._content.agrees:
            self.wrong_files.append(
                f"{file.name}: its bytes do not have the digest that was registered"
            )
            return
        try:
            self._tensors += parse_header(bytes(self._head[: header_bytes(self._head, file)]), file)
        except CheckpointError as error:
            self.wrong_files.append(
                f"{file.name}: its header is not the one that was registered: {error}"
            )

    def _check_layout(self) -> None:
        if self.wrong_files or not all(names_content(file) for file in self.manifest.files):
            return
        try:
            check_layout(self.manifest, self._tensors)
        except SourceChanged as error:
            self.wrong_files.append(error.message)

    def differences(self, recorded: Manifest) -> list[str]:
        """What is not as it was registered, or recorded when it was read before."""
        different = list(self.wrong_files)
        for (part, index), digest in sorted(self.found.items()):
            chunk = recorded.parts[part].chunks[index]
            if chunk.digest not in (None, digest):
                stop = chunk.image_offset + chunk.size_bytes
                different.append(
                    f"part {part}, bytes [{chunk.image_offset}, {stop}), from {self._ranges(chunk)}"
                )
        return different

    def learned(self, recorded: Manifest) -> dict[int, tuple[Digest, ...]]:
        """The digests of parts of which some are not recorded.

        Empty where anything differs: then what is right is not known.
        """
        if self.differences(recorded):
            return {}
        return {
            number: tuple(self.found[number, index] for index in range(len(part.chunks)))
            for number, part in enumerate(recorded.parts)
            if any(chunk.digest is None for chunk in part.chunks)
        }

    def _ranges(self, chunk: Chunk) -> str:
        first, last = chunk.segments[0], chunk.segments[-1]
        files = self.manifest.files
        start = f"{files[first.file].name} at byte {first.file_offset}"
        return start if first.file == last.file else f"{start} to {files[last.file].name}"
