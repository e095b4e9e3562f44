"""Usage that outlives its gateway: what each request was given so far, in a mapped file.

A process that is killed takes nothing of it along: the pages of a mapped file are the kernel's. No
request waits for it, and a piece of an answer costs the writing of one number. What a gateway
leaves behind is found by the next one with this folder (``left_behind``)::

    file    [head | slot 0 | slot 1 | ...]
    slot    state, streamed, lengths | when, prompt, output | request id, key id, model | device | status

A slot is used from the first token of a stream, or from the end of any other request, until its row
is in the database. Its state is written last, so that a slot never says what is not there yet.
"""

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

PATTERN = "usage-*.journal"
LOST_STATUS = "gateway_lost"
"""Of a stream that ended with its gateway."""
MAX_SLOTS = 65_536
"""Requests that run or whose rows wait for the database; of more, a killed gateway loses what is
not written."""
SLOT_BYTES = 512
SLOTS_AT_A_TIME = 128
"""Made room for on the disk. What is written to a mapped file without room there ends the process.
"""
_MAGIC = b"PLUSAGE1"
_HEAD = struct.Struct("<8sQQ")
"""Magic, the number of its writer, and how many slots were ever used."""
_USED_AT = 16
_SLOT = struct.Struct("<BBHHxxqQQ")
"""State, whether it is streamed, bytes of the texts and of the status, microseconds since 1970,
tokens of the prompt and of the output."""
_OUTPUT_AT = 24
_TOKENS = struct.Struct("<Q")
_STATUS_BYTES = 64
_TEXTS_AT = _SLOT.size
_STATUS_AT = SLOT_BYTES - _STATUS_BYTES
_DEVICE = struct.Struct("<Q")
"""Microseconds of devices. A release that does not know them leaves zeros there."""
_DEVICE_AT = _STATUS_AT - _DEVICE.size
_FREE, _RUNNING, _ENDED = 0, 1, 2
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class UsageRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One finished request."""

    at: datetime
    model: str
    key_id: str
    request_id: str
    prompt_tokens: int
    output_tokens: int
    status: str
    device_s: float = 0.0


class Meter:
    """One request's slot."""

    __slots__ = ("_journal", "_offset")

    def __init__(self, journal: "UsageJournal", offset: int) -> None:
        self._journal = journal
        self._offset = offset

    def output(self, tokens: int, device_s: float = 0.0) -> None:
        """Its client is about to be sent this much of its answer, in all; it took these
        device-seconds.
        """
        self._journal.put(self._offset, tokens, device_s)

    def ended(self, row: UsageRow) -> None:
        """It is over, and this is its row."""
        self._journal.end(self._offset, row)

    def written(self) -> None:
        """The row is in the database, or nobody wants it: the slot is free."""
        self._journal.free(self._offset)


class UsageJournal:
    """The file of one gateway, which is locked as long as the gateway lives."""

    def __init__(self, folder: Path, writer: int) -> None:
        """Make the file.

        Args:
            folder: outlives the gateway.
            writer: the number under which it writes rows (``UsageRepository.add``): no other's.

        Raises:
            OSError: it cannot be made.
        """
        self._path = folder / f"usage-{writer:016x}.journal"
        # Under its own name it is there only once it is locked: it would be taken for one that was
        # left behind.
        fresh = self._path.with_suffix(".new")
        self._descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        os.ftruncate(self._descriptor, _HEAD.size + MAX_SLOTS * SLOT_BYTES)
        self._allocated = 0
        try:
            self._allocate()
            self._map = mmap.mmap(self._descriptor, 0)
        except OSError:
            fresh.unlink()
            os.close(self._descriptor)
            raise
        _HEAD.pack_into(self._map, 0, _MAGIC, writer, 0)
        fresh.rename(self._path)
        self._used = 0
        self._free: list[int] = []

    def begin(
        self,
        at: datetime,
        *,
        model: str,
        key_id: str,
        request_id: str,
        prompt_tokens: int,
        streamed: bool,
    ) -> Meter | None:
        """A slot for a stream that has its first token; None where there is no room.

        Args:
            at: the moment.
            model: its name.
            key_id: of the API key that pays.
            request_id: the client's request.
            prompt_tokens: what is billed of its prompts.
            streamed: its client gets the answer as it comes. Otherwise there is no answer before
                it is whole.
        """
        texts = msgspec.msgpack.encode((request_id, key_id, model))
        offset = self._slot(texts)
        if offset is None:
            return None
        facts = (streamed, len(texts), 0, _microseconds(at), prompt_tokens, 0)
        self._put(offset, _SLOT.pack(_FREE, *facts))
        self._put(offset + _DEVICE_AT, _DEVICE.pack(0))
        self._map[offset] = _RUNNING
        return Meter(self, offset)

    def note(self, row: UsageRow) -> Meter | None:
        """A slot for a request that has ended and had none; None where there is no room."""
        texts = msgspec.msgpack.encode((row.request_id, row.key_id, row.model))
        offset = self._slot(texts)
        if offset is None:
            return None
        self._put_end(offset, False, len(texts), row)
        return Meter(self, offset)

    def _slot(self, texts: bytes) -> int | None:
        """A slot that is free, with these texts in it; None where there is no room."""
        if len(texts) > _DEVICE_AT - _TEXTS_AT:
            return None
        if self._free:
            offset = self._free.pop()
        elif self._used < MAX_SLOTS and self._has_room():
            offset = _HEAD.size + self._used * SLOT_BYTES
            self._used += 1
            self._put(_USED_AT, _TOKENS.pack(self._used))
        else:
            return None
        self._map[offset + _TEXTS_AT : offset + _TEXTS_AT + len(texts)] = texts
        return offset

    def _has_room(self) -> bool:
        """On the disk, for one slot more."""
        if self._used < self._allocated:
            return True
        try:
            self._allocate()
        except OSError:
            return False
        return True

    def _allocate(self) -> None:
        end = _HEAD.size + (self._allocated + SLOTS_AT_A_TIME) * SLOT_BYTES
        os.posix_fallocate(self._descriptor, 0, end)
        self._allocated += SLOTS_AT_A_TIME

    def _put(self, offset: int, data: bytes) -> None:
        """Write what may be there already. ``pack_into`` would fill it with zeros first, and a
        gateway that is killed in between leaves these.
        """
        self._map[offset : offset + len(data)] = data

    def put(self, offset: int, output_tokens: int, device_s: float) -> None:
        """As ``Meter.output``."""
        self._put(offset + _DEVICE_AT, _DEVICE.pack(int(device_s * 1e6)))
        self._put(offset + _OUTPUT_AT, _TOKENS.pack(output_tokens))

    def end(self, offset: int, row: UsageRow) -> None:
        """As ``Meter.ended``."""
        _, streamed, texts, *_ = _SLOT.unpack_from(self._map, offset)
        self._put_end(offset, streamed, texts, row)

    def _put_end(self, offset: int, streamed: int, texts: int, row: UsageRow) -> None:
        """Write a row into a slot that has its texts: they are ``texts`` bytes."""
        status = row.status.encode()[:_STATUS_BYTES]
        self._map[offset + _STATUS_AT : offset + _STATUS_AT + len(status)] = status
        facts = (_microseconds(row.at), row.prompt_tokens, row.output_tokens)
        state = self._map[offset]
        self._put(offset, _SLOT.pack(state, streamed, texts, len(status), *facts))
        self._put(offset + _DEVICE_AT, _DEVICE.pack(int(row.device_s * 1e6)))
        self._map[offset] = _ENDED

    def free(self, offset: int) -> None:
        """As ``Meter.written``."""
        self._map[offset] = _FREE
        self._free.append(offset)

    def close(self) -> None:
        """The gateway ends. The file goes, unless there are rows in it that were not written."""
        if len(self._free) == self._used:
            self._path.unlink(missing_ok=True)
        self._map.close()
        os.close(self._descriptor)


class LeftBehind:
    """The file of a gateway that is no more, locked for the one that takes it over."""

    def __init__(self, path: Path, descriptor: int, writer: int, rows: Sequence[UsageRow]) -> None:
        self._path = path
        self._descriptor = descriptor
        self.writer = writer
        self.rows = rows

    def done(self) -> None:
        """Its rows are in the database: remove it."""
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def leave(self) -> None:
        """Let another try."""
        os.close(self._descriptor)


def left_behind(folder: Path) -> Iterator[LeftBehind]:
    """What killed gateways left in a folder, each file for one that asks."""
    for path in sorted(folder.glob(PATTERN)):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                continue
            if not os.fstat(descriptor).st_nlink:
                # Another was here first, and is done with it.
                os.close(descriptor)
                continue
            writer, rows = _read(descriptor)
            yield LeftBehind(path, descriptor, writer, rows)


def _read(descriptor: int) -> tuple[int, list[UsageRow]]:
    """The writer's number and every row; none of a file that is no journal."""
    head = os.pread(descriptor, _HEAD.size, 0)
    if len(head) < _HEAD.size or not head.startswith(_MAGIC):
        return 0, []
    _, writer, used = _HEAD.unpack(head)
    slots = (
        os.pread(descriptor, SLOT_BYTES, _HEAD.size + number * SLOT_BYTES)
        for number in range(min(used, MAX_SLOTS))
    )
    return writer, [row for slot in slots if (row := _row(slot)) is not None]


def _row(slot: bytes) -> UsageRow | None:
    """What a slot says; None: nothing that is to be billed."""
    state, streamed, texts, status, at_us, prompt_tokens, output_tokens = _SLOT.unpack_from(slot)
    if state == _FREE or (state == _RUNNING and not (streamed and output_tokens)):
        return None
    named = msgspec.msgpack.decode(slot[_TEXTS_AT : _TEXTS_AT + texts], type=tuple[str, str, str])
    ended = slot[_STATUS_AT : _STATUS_AT + status].decode(errors="replace")
    (device_us,) = _DEVICE.unpack_from(slot, _DEVICE_AT)
    return UsageRow(
        at=_EPOCH + timedelta(microseconds=at_us),
        request_id=named[0],
        key_id=named[1],
        model=named[2],
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        status=ended if state == _ENDED else LOST_STATUS,
        device_s=0.0 if texts > _DEVICE_AT - _TEXTS_AT else device_us / 1e6,
    )


def _microseconds(at: datetime) -> int:
    return (at - _EPOCH) // _MICROSECOND
