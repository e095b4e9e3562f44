"""What a node's host pool holds, for which claims, and what is on its way there.

Claims of one model share one fetch. One that fails fails every claim that waits for it, and is
forgotten: the next claim starts another. Where a fetch finds that the bytes are not the source's,
the copy is spoiled: no new claim gets it, and its parts are given up as soon as no lease reads
them.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from pilotlight.common.clock import wall_offset_s
from pilotlight.common.errors import BadRequest, InternalError, PilotlightError
from pilotlight.common.messages.pool import RETURN_S, PartReady
from pilotlight.dataplane.chunk_fetch import OriginObserver
from pilotlight.dataplane.fetch_tools import FetchTools
from pilotlight.dataplane.held import HeldChunk, held_chunk
from pilotlight.dataplane.layout import tensor_places
from pilotlight.dataplane.model_fetch import ModelFetch, PartsClaim
from pilotlight.policy.cluster import Copy, FetchPriority, LinkSpeed, OriginKind, Tier, Transfer
from pilotlight.policy.ids import Digest, InstanceId, NodeId
from pilotlight.policy.model import Model
from pilotlight.policy.phase import Moment

log = structlog.get_logger()


class Owner(Protocol):
    """Owns background tasks."""

    def spawn(self, name: str, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]": ...


class Observer(OriginObserver, Protocol):
    """Hears what happens to copies. Calls come within the event loop and must not block."""

    def on_copies_changed(self) -> None:
        """A part became ready, a copy was dropped, a fetch began or ended."""
        ...

    def on_fetch_ended(self, seconds: float, size_bytes: int, code: str) -> None:
        """A fetch is over: ``code`` is empty, or that of the error it ended with."""
        ...


class HostCopies:
    """Claims, and the fetches that serve them."""

    def __init__(self, tools: FetchTools, owner: Owner, observer: Observer) -> None:
        self._tools = tools
        self._owner = owner
        self._observer = observer
        self._claims: dict[Digest, list[PartsClaim]] = {}
        self._fetches: dict[Digest, ModelFetch] = {}
        self._runs: dict[Digest, asyncio.Task[None]] = {}
        self._drivers: set[asyncio.Task[None]] = set()
        self._spoiled: dict[Digest, PilotlightError] = {}
        self._adopted = frozenset(held.digest for held in tools.pool.copies())
        self._adopted_until_s = tools.clock.monotonic_s() + RETURN_S

    def claim(
        self,
        model: Model,
        parts: Iterable[int],
        instance_id: InstanceId,
        *,
        leased: bool,
        trace_parent: str = "",
        since_s: float | None = None,
        priority: FetchPriority = FetchPriority.COLD_START,
    ) -> PartsClaim:
        """Claim parts of a model: what is missing is fetched, what is ready stays for as long as a
        lease claims it.

        A fetch matters as much as the first of its claims does; a lease is for a cold start.

        Args:
            model: The one whose parts are claimed.
            parts: Their numbers, from 0, in any order.
            instance_id: For which they are.
            leased: Whether a lease claims them.
            trace_parent: The trace that the fetch belongs to; empty: none.
            since_s: When it was asked for, on the host's monotonic clock; None: now. The fetch
                counts from then.
            priority: How much the fetch matters to this claim.

        Raises:
            BadRequest: the model has no such part.
        """
        wanted = tuple(sorted(set(parts)))
        if not wanted or wanted[0] < 0 or wanted[-1] >= len(model.spec.part_bytes):
            raise BadRequest(
                f"{model.name} has parts 0 to {len(model.spec.part_bytes) - 1}, not {wanted}"
            )
        now_s = self._tools.clock.monotonic_s()
        spoiled = self._spoiled.get(model.digest)
        found = {
            part: now_s for part in wanted if self._tools.pool.find(model.digest, part) is not None
        }
        claim = PartsClaim(
            instance_id=instance_id,
            model=model,
            parts=wanted,
            leased=leased,
            trace_parent=trace_parent,
            since_s=now_s if since_s is None else since_s,
            priority=priority,
            ready=found if spoiled is None else {},
            error=spoiled,
        )
        self._claims.setdefault(model.digest, []).append(claim)
        self._tools.pool.touch(model.digest)
        if claim.missing and spoiled is None:
            self._join(claim)
        return claim

    def release(self, claim: PartsClaim) -> None:
        """End a claim. A fetch that no other claim waits for is cancelled."""
        digest = claim.model.digest
        claims = self._claims.get(digest, [])
        if claim not in claims:
            return
        claims.remove(claim)
        if not claims:
            del self._claims[digest]
        self._tools.pool.touch(digest)
        fetch = self._fetches.get(digest)
        if fetch is not None and claim in fetch.claims:
            fetch.account(claim.instance_id)
            fetch.claims.remove(claim)
            run = self._runs.get(digest)
            if not fetch.claims and run is not None:
                run.cancel()
        self._give_up_spoiled(digest)
        self._observer.on_copies_changed()

    async def ready_parts(self, claim: PartsClaim) -> AsyncIterator[PartReady]:
        """A claim's parts with the places of their tensors, in execution order, each as soon as it
        is ready.

        For one reader.

        Raises:
            PilotlightError: a part cannot be had.
        """
        for number in claim.parts:
            while number not in claim.ready:
                if claim.error is not None:
                    raise claim.error
                await claim.changed.wait()
                claim.changed.clear()
            manifest = await self._tools.manifests.get(claim.model)
            image = self._tools.pool.find(claim.model.digest, number)
            if image is None:
                raise InternalError(
                    f"part {number} of {claim.model.name} is held and yet not in the pool"
                )
            places = tensor_places(manifest.parts[number], self._tools.pool.file_offset(image))
            ready = Moment(at_s=claim.ready[number], wall_offset_s=wall_offset_s(self._tools.clock))
            yield PartReady(part=number, tensors=places, ready=ready, serial=image.serial)

    def drop(self, digests: Iterable[Digest]) -> tuple[Digest, ...]:
        """Free copies; the ones that were freed. One under a lease, or on its way, stays."""
        dropped: list[Digest] = []
        for digest in digests:
            is_sent = self._tools.pool.is_pinned(digest)
            in_use = (
                is_sent
                or digest in self._fetches
                or any(claim.leased for claim in self._claims.get(digest, []))
            )
            if not in_use and not self._may_return(digest) and self._tools.pool.drop(digest):
                dropped.append(digest)
        if dropped:
            self._observer.on_copies_changed()
        return tuple(dropped)

    def copies(self, node_id: NodeId) -> tuple[Copy, ...]:
        """The copies in the pool, as facts."""
        now_s = self._tools.clock.monotonic_s()
        return tuple(
            Copy(
                digest=held.digest,
                node_id=node_id,
                tier=Tier.HOST,
                parts=held.parts,
                size_bytes=held.size_bytes,
                leases=sum(claim.leased for claim in self._claims.get(held.digest, [])),
                idle_s=now_s - held.last_used_s,
            )
            for held in self._tools.pool.copies()
        )

    def transfers(self) -> tuple[Transfer, ...]:
        """The fetches that are under way, as facts."""
        return tuple(fetch.transfer() for fetch in self._fetches.values() if fetch.claims)

    def held(self, digest: Digest, part: int, index: int) -> HeldChunk | None:
        """A chunk that is in the pool or on its way there, and may be passed on."""
        if digest in self._spoiled:
            return None
        image = self._tools.pool.find(digest, part)
        if image is not None:
            return held_chunk(self._tools.pool, image, index)
        fetch = self._fetches.get(digest)
        return fetch.held(part, index) if fetch is not None else None

    def is_whole(self, digest: Digest, part: int) -> bool:
        """Whether all of a part may be passed on."""
        return digest not in self._spoiled and self._tools.pool.find(digest, part) is not None

    def is_expected(self, digest: Digest, part: int) -> bool:
        """Whether a part is on its way, or about to be."""
        fetch = self._fetches.get(digest)
        return fetch is not None and part in fetch.wanted

    def priority(self, digest: Digest) -> FetchPriority:
        """How much a model's fetch matters at this moment."""
        fetch = self._fetches.get(digest)
        return fetch.priority if fetch is not None else FetchPriority.PREFETCH

    @property
    def is_fetching(self) -> bool:
        """Whether a fetch goes on. Any thread may ask."""
        return bool(self._fetches)

    def links(self) -> tuple[LinkSpeed, ...]:
        """What the links gave over which chunks came, as facts."""
        return self._tools.lanes.measured()

    async def stop(self) -> None:
        """End every fetch, and wait until no thread writes to the pool any more."""
        for digest, run in self._runs.items():
            self._fetches[digest].claims.clear()
            run.cancel()
        await asyncio.gather(*self._drivers, return_exceptions=True)
        self._tools.readers.stop()

    def _join(self, claim: PartsClaim) -> None:
        digest = claim.model.digest
        fetch = self._fetches.get(digest)
        if fetch is not None:
            fetch.claims.append(claim)
            self._tools.moved.send()
            return
        self._start(claim.model, [claim], claim.since_s)

    def _start(self, model: Model, claims: list[PartsClaim], start_s: float) -> None:
        digest = model.digest
        fetch = ModelFetch(model, self._tools, _Listener(self, self._observer, digest), start_s)
        fetch.claims.extend(claims)
        self._fetches[digest] = fetch
        self._tools.moved.send()
        run = self._runs[digest] = asyncio.create_task(
            fetch.run(), name=f"fetch {fetch.model.name}"
        )
        driver = self._owner.spawn(f"drive fetch {fetch.model.name}", self._drive(fetch, run))
        self._drivers.add(driver)
        driver.add_done_callback(self._drivers.discard)
        self._observer.on_copies_changed()

    async def _drive(self, fetch: ModelFetch, run: "asyncio.Task[None]") -> None:
        """See a fetch to its end and clean up after it; then serve the claims that came too late
        for it with another one.
        """
        digest, clock = fetch.model.digest, self._tools.clock
        try:
            await asyncio.wait({run})
        finally:
            run.cancel()
            del self._runs[digest]
        error = self._spoiled.get(digest) or _error_of(run)
        if error is not None:
            log.warning(
                "fetch failed",
                action="fetch_failed",
                model=fetch.model.name,
                code=error.code,
                error=error.message,
            )
            for claim in fetch.claims:
                fetch.account(claim.instance_id)
                claim.error = error
                claim.changed.set()
            fetch.claims.clear()
            if fetch.is_spoiled:
                self._spoiled[digest] = error
        self._observer.on_fetch_ended(
            clock.monotonic_s() - fetch.start_s, fetch.done_bytes, error.code if error else ""
        )
        await fetch.cleaned_up()
        self._owner.spawn(f"close the source of {fetch.model.name}", fetch.closed())
        del self._fetches[digest]
        self._tools.moved.send()
        self._give_up_spoiled(digest)
        late = [claim for claim in fetch.claims if claim.missing]
        if late:
            self._start(fetch.model, late, clock.monotonic_s())
        else:
            self._observer.on_copies_changed()

    def on_ready(self, digest: Digest) -> None:
        """A part of a model is ready."""
        fetch = self._fetches[digest]
        for claim in [claim for claim in fetch.claims if not claim.missing]:
            fetch.account(claim.instance_id)
            fetch.claims.remove(claim)
        self._observer.on_copies_changed()

    def on_disputed(self, digest: Digest, error: PilotlightError) -> None:
        """Another node read other bytes of a model, and was first: no new claim gets what is
        here.
        """
        self._spoiled.setdefault(digest, error)
        run = self._runs.get(digest)
        if run is not None:
            run.cancel()
        self._give_up_spoiled(digest)
        self._observer.on_copies_changed()

    def _give_up_spoiled(self, digest: Digest) -> None:
        """Free a spoiled copy, unless a lease still reads it: the next claim has it fetched
        anew.
        """
        is_read = any(claim.leased and claim.ready for claim in self._claims.get(digest, []))
        if (
            digest in self._spoiled
            and digest not in self._fetches
            and not is_read
            and not self._may_return(digest)
        ):
            del self._spoiled[digest]
            self._tools.pool.drop(digest)

    def _may_return(self, digest: Digest) -> bool:
        """Whether workers may be reading it by a lease that they had of the loader before this
        one.
        """
        return digest in self._adopted and self._tools.clock.monotonic_s() < self._adopted_until_s


@dataclass(frozen=True, slots=True)
class _Listener:
    """Hears how one fetch gets on."""

    copies: HostCopies
    observer: Observer
    digest: Digest

    def on_ready(self) -> None:
        self.copies.on_ready(self.digest)

    def on_disputed(self, error: PilotlightError) -> None:
        self.copies.on_disputed(self.digest, error)

    def on_chunk(self, kind: OriginKind, name: str, size_bytes: int) -> None:
        self.observer.on_chunk(kind, name, size_bytes)

    def on_origin_failed(self, kind: OriginKind, name: str, code: str) -> None:
        self.observer.on_origin_failed(kind, name, code)


def _error_of(run: "asyncio.Task[None]") -> PilotlightError | None:
    """What a fetch ended with; None when it was done or no claim wanted it any more."""
    if run.cancelled():
        return None
    error = run.exception()
    if error is None or isinstance(error, PilotlightError):
        return error
    log.error("fetch died", action="fetch_died", exc_info=error)
    return InternalError(f"the fetch died: {error!r}")
