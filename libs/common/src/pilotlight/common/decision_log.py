"""A leader's decision log: all that its ticks looked at, and what they said.

One file for each term, and a further one when it has become long. A file is one stream of
frames (``common.decision_stream``). The first frame has the figures of the decisions; each
further one is a tick, with what changed in its facts since the tick before (``common.deltas``).
A tick begins where the one before it ended, so plans are in no frame, and memories in the first one
alone: whoever replays the log has them from ``tick``. Of what a tick said a frame has what a reader
wants to see, and a digest of the whole plan.

A file that a process did not end well is read as far as it is whole.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from pilotlight.common.decision_digest import digest_of, said
from pilotlight.common.decision_rules import rules_from
from pilotlight.common.decision_stream import Squeezer, frames_of
from pilotlight.common.deltas import Change, change_of, changed_by
from pilotlight.common.errors import BadRequest, InternalError
from pilotlight.policy.cluster import NodeFacts, WorkerView
from pilotlight.policy.control.books import Books, Record
from pilotlight.policy.control.plan import (
    Backing,
    ControlFacts,
    ControlRules,
    Memory,
    Plan,
    Refusal,
    Term,
    Told,
)
from pilotlight.policy.control.table import Table
from pilotlight.policy.ids import Epoch, InstanceId, ModelName, NodeId, WorkerId
from pilotlight.policy.model import Model
from pilotlight.policy.plan import Instance

FORMAT = 3
SUFFIX = ".decisions"
NO_BOOKS = Books()
NO_FACTS = ControlFacts(
    now_s=0.0,
    term=Term(epoch=Epoch(0), started_s=0.0, listening_since_s=0.0, deaf=False, announced=False),
    books=NO_BOOKS,
    workers={},
    nodes={},
    models={},
)
"""What the facts of the first tick of a file differ from."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """First frame of a file."""

    format: int
    policy_version: str
    """Of the code that decided (``common.policy_version``)."""
    epoch: int
    started_at_s: float
    """Wall time."""
    rules: Change
    eviction: str = "lru"
    """Policy by which evictions are expected: one of ``choice.EXPECTED``."""


class Frame(msgspec.Struct, frozen=True, kw_only=True, array_like=True, omit_defaults=True):
    """One tick."""

    facts: Change
    """Without the books."""
    records: list[tuple[str, Change | None]]
    """Instances that changed between two ticks, in the order in which they did; None: gone."""
    digest: bytes
    """Of everything that the tick said."""
    said: list[str] = msgspec.field(default_factory=list[str])
    """Its decisions, as a reader wants to see them."""
    memory: Change | None = None
    """What the first tick of a file was handed; it has no index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BookEntry:
    """A record, whose model is mostly a registered one."""

    instance: Instance
    trace_parent: str = ""
    tentative: bool = False
    seen_on: frozenset[WorkerId] = frozenset()
    model: Model | None = None
    """None: the model of that name, as it is registered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """A memory without its index, as it is written down."""

    wanted: Mapping[ModelName, str] = field(default_factory=dict[ModelName, str])
    backing: Mapping[ModelName, Backing] = field(default_factory=dict[ModelName, Backing])
    tries: Mapping[ModelName, tuple[Refusal, ...]] = field(
        default_factory=dict[ModelName, tuple[Refusal, ...]]
    )
    told_workers: Mapping[WorkerId, Told] = field(default_factory=dict[WorkerId, Told])
    told_nodes: Mapping[NodeId, Told] = field(default_factory=dict[NodeId, Told])
    repeated_s: float | None = None
    """None: never."""


NOTHING_HANDED = Handed()


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """One tick, as its leader notes it: references, and copies of what is written to later."""

    facts: ControlFacts
    """Without workers and nodes that did not change."""
    workers: Mapping[WorkerId, WorkerView | None]
    nodes: Mapping[NodeId, NodeFacts | None]
    handed: Handed | None
    """Of the first tick of a file: then these are all workers, nodes and records."""
    records: Mapping[InstanceId, tuple[Record | None, Record | None]]
    """Before and after."""
    plan: Plan


def noted(facts: ControlFacts, memory: Memory, plan: Plan, *, first: bool) -> Noted:
    """What is to be written of a tick. Costs what changed.

    Args:
        facts: What it looked at.
        memory: What it was handed.
        plan: What it said.
        first: It is the first one of a file. It must have no index.
    """
    changed, books = facts.changed, facts.books
    everything = first or changed is None
    workers = facts.workers if everything or changed is None else changed.workers
    nodes = facts.nodes if everything or changed is None else changed.nodes
    handed = Handed(
        wanted=memory.wanted,
        backing=memory.backing,
        tries=memory.tries,
        told_workers=memory.told_workers,
        told_nodes=memory.told_nodes,
        repeated_s=None if memory.repeated_s == -math.inf else memory.repeated_s,
    )
    before = dict.fromkeys(books.records) if first else books.touched
    return Noted(
        facts=replace(facts, books=NO_BOOKS, workers={}, nodes={}),
        workers={one: facts.workers.get(one) for one in workers},
        nodes={one: facts.nodes.get(one) for one in nodes},
        handed=handed if first else None,
        records={one: (was, books.get(one)) for one, was in before.items()},
        plan=plan,
    )


class LogWriter:
    """Writes one file: what is written is kept here until it is flushed."""

    def __init__(self, file: BinaryIO, header: Header) -> None:
        self._file = file
        self._squeezed = bytearray()
        self._stream = Squeezer()
        self._facts = NO_FACTS
        self._workers: dict[WorkerId, WorkerView] = {}
        self._nodes: dict[NodeId, NodeFacts] = {}
        self._models: Mapping[ModelName, Model] = {}
        self.size_bytes = 0
        self._put(msgspec.msgpack.encode(header))

    def write(self, one: Noted) -> None:
        """Write a tick. It goes to the file with the next ``flush``; until then no file is touched,
        so that this takes as long on any disk.
        """
        # Of thousands of workers and nodes those that changed: what is the same says nothing.
        before = replace(
            self._facts,
            workers=_known(self._workers, one.workers),
            nodes=_known(self._nodes, one.nodes),
        )
        after = replace(one.facts, workers=_there(one.workers), nodes=_there(one.nodes))
        records = [
            (str(key), None if now is None else change_of(_entry(was, self._models), entry))
            for key, (was, now) in one.records.items()
            if (entry := _entry(now, after.models)) is not None or now is None
        ]
        frame = Frame(
            facts=change_of(before, after),
            records=records,
            digest=digest_of(one.plan),
            said=said(one.plan),
            memory=None if one.handed is None else change_of(NOTHING_HANDED, one.handed),
        )
        self._put(msgspec.msgpack.encode(frame))
        self._facts, self._models = replace(one.facts, workers={}, nodes={}), after.models
        _take(self._workers, one.workers)
        _take(self._nodes, one.nodes)

    def flush(self) -> None:
        """Everything written so far can be read."""
        self._out(self._stream.flush())
        self._to_file()
        self._file.flush()

    def close(self) -> None:
        """End the file."""
        self._out(self._stream.end())
        try:
            self._to_file()
        finally:
            self._file.close()

    def _put(self, frame: bytes) -> None:
        self._out(self._stream.put(frame))

    def _out(self, squeezed: bytes) -> None:
        self._squeezed += squeezed
        self.size_bytes += len(squeezed)

    def _to_file(self) -> None:
        squeezed, self._squeezed = self._squeezed, bytearray()
        self._file.write(squeezed)


def _known(before: Mapping[Any, Any], news: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: before[key] for key in news if key in before}


def _there(news: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in news.items() if value is not None}


def _take(into: dict[Any, Any], news: Mapping[Any, Any]) -> None:
    for key, value in news.items():
        if value is None:
            into.pop(key, None)
        else:
            into[key] = value


def _entry(record: Record | None, models: Mapping[ModelName, Model]) -> BookEntry | None:
    if record is None:
        return None
    registered = models.get(record.model.name) == record.model
    return BookEntry(
        instance=record.instance,
        trace_parent=record.trace_parent,
        tentative=record.tentative,
        seen_on=record.seen_on,
        model=None if registered else record.model,
    )


@dataclass(slots=True)
class LoggedTick:
    """One tick, as it is read."""

    number: int
    facts: ControlFacts
    """With the books of the tick before; ``with_records`` brings them up."""
    records: list[tuple[str, Change | None]]
    models_before: Mapping[ModelName, Model]
    digest: bytes
    said: tuple[str, ...]
    memory: Memory | None
    """Of the first tick of a file."""

    def with_books(self, books: Books) -> ControlFacts:
        """The facts, with the books that the tick before left and what was put in them since.

        Raises:
            InternalError: the books are not those of the tick before.
        """
        for key, change in self.records:
            instance_id = InstanceId(key)
            if change is None:
                books = books.without((instance_id,))
                continue
            before = _entry(books.get(instance_id), self.models_before)
            entry: BookEntry | None = changed_by(before, change, BookEntry | None)
            if entry is None:
                raise InternalError(f"{instance_id} is neither there nor gone")
            model = entry.model or self.facts.models[entry.instance.model]
            record = Record(
                instance=entry.instance,
                model=model,
                trace_parent=entry.trace_parent,
                tentative=entry.tentative,
                seen_on=entry.seen_on,
            )
            books = books.put(record)
        return replace(
            self.facts,
            books=books,
            told_nodes={key: _told(one) for key, one in self.facts.told_nodes.items()},
            told_workers={key: _told(one) for key, one in self.facts.told_workers.items()},
        )


@dataclass(slots=True)
class LogReader:
    """Reads one file.

    Raises:
        BadRequest: it is none, or of a later format.
    """

    path: Path
    header: Header = field(init=False)
    rules: ControlRules = field(init=False)
    _frames: Iterator[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self._frames = frames_of(self.path)
        try:
            self.header = msgspec.msgpack.decode(next(self._frames), type=Header)
        except (StopIteration, msgspec.DecodeError) as error:
            raise BadRequest(f"{self.path} is no decision log") from error
        if self.header.format > FORMAT:
            raise BadRequest(f"{self.path} is of format {self.header.format}; a later release's")
        try:
            self.rules = rules_from(self.header.rules, self.header.eviction)
        except KeyError as error:
            raise BadRequest(f"{self.path} has a policy {error} that is not known") from error

    def ticks(self) -> Iterator[LoggedTick]:
        """Every tick, in order, up to where the file is whole.

        Raises:
            BadRequest: a frame cannot be understood.
        """
        facts = NO_FACTS
        for number, frame in enumerate(self._frames):
            models_before = facts.models
            try:
                read = msgspec.msgpack.decode(frame, type=Frame)
                facts = changed_by(facts, read.facts, ControlFacts)
            except (msgspec.DecodeError, InternalError) as error:
                raise BadRequest(f"{self.path}, tick {number}: {error}") from error
            yield LoggedTick(
                number=number,
                facts=facts,
                records=read.records,
                models_before=models_before,
                digest=read.digest,
                said=tuple(read.said),
                memory=None if read.memory is None else _memory(read.memory),
            )


def _memory(change: Change) -> Memory:
    handed = changed_by(NOTHING_HANDED, change, Handed)
    return Memory(
        wanted=handed.wanted,
        backing=handed.backing,
        tries=handed.tries,
        told_workers=Table[WorkerId, Told]().put(
            {key: _told(one) for key, one in handed.told_workers.items()}
        ),
        told_nodes=Table[NodeId, Told]().put(
            {key: _told(one) for key, one in handed.told_nodes.items()}
        ),
        repeated_s=-math.inf if handed.repeated_s is None else handed.repeated_s,
    )


def _told(one: Told) -> Told:
    return replace(one, essence=tuple(map(_plain, one.essence)))


def _plain(value: object) -> object:
    """As it was written: msgpack knows no tuples."""
    return tuple(map(_plain, cast("list[object]", value))) if isinstance(value, list) else value
