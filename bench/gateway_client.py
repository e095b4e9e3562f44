"""One process of the client of ``bench/gateway.py``: the same code asks every server.

It reads a job as one line of JSON and keeps ``concurrency`` connections busy, each with one request
at a time, or sends at a rate, for ``warm_s`` and then ``duration_s``. It says ``begin`` and ``end``
around each window of the time that counts, so that others can read processor times at those
moments, and then one line: how many requests ended in that time, their latencies and what was
wrong. Bytes are looked at no more than
needed to see the end of an answer and whether it is right.
"""

import asyncio
import gc
import json
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import uvloop

END_OF_CHUNKS = b"\r\n0\r\n\r\n"
SHARES = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
TOLD_ERRORS = 5
CONNECT_AT_ONCE = 200
REFUSED_PAUSE_S = 0.05
REFUSED = ("429", "503")
"""What a server answers that has no room."""
IDLE_S = 30.0
"""A connection that has had nothing to do for so long is closed, and not used again: a server may
be about to end it."""
SEED = 20_261_122


@dataclass(frozen=True)
class Job:
    """What to ask, of whom, for how long."""

    host: str
    port: int
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    concurrency: int
    warm_s: float
    duration_s: float
    hold: bool = False
    """Ask once on each connection, and leave without an answer."""
    pause_s: float = 0.0
    """Between an answer and the next request of its connection."""
    rate_per_s: float = 0.0
    """Of requests that are sent whether or not others were answered; 0: each connection sends the
    next when it has its answer."""
    rates_per_s: Sequence[float] = ()
    """Of each window one, in the place of ``rate_per_s``, which is that of the time before them."""
    most: int = sys.maxsize
    """Requests at a rate; no more come then."""
    windows: int = 1
    """Parts of ``duration_s`` that are told one by one."""

    def request(self) -> bytes:
        """As it is sent."""
        body = json.dumps(self.body).encode()
        lines = [
            f"POST {self.path} HTTP/1.1",
            f"host: {self.host}:{self.port}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            *(f"{name}: {value}" for name, value in self.headers.items()),
        ]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@dataclass
class Tally:
    """What came of requests that ended in the time that counts."""

    latencies_s: list[float] = field(default_factory=list[float])
    first_s: list[float] = field(default_factory=list[float])
    """From a request to the first bytes of its answer's body."""
    errors: int = 0
    """Whatever was no answer, refusals among them."""
    refused: Counter[str] = field(default_factory=Counter[str])
    """By status."""
    first_errors: list[str] = field(default_factory=list[str])
    counting: bool = False

    def wrong(self, what: str, status: str = "") -> None:
        """There was no answer."""
        self.errors += 1
        if status in REFUSED:
            self.refused[status] += 1
        if len(self.first_errors) < TOLD_ERRORS:
            self.first_errors.append(what)

    def clear(self) -> None:
        """Begin anew."""
        self.latencies_s.clear()
        self.first_s.clear()
        self.errors = 0
        self.refused.clear()
        self.first_errors.clear()

    def told(self) -> dict[str, Any]:
        """As figures."""
        figures: dict[str, Any] = {"requests": len(self.latencies_s), "errors": self.errors}
        if self.errors:
            figures |= {"first_errors": self.first_errors, "refused": dict(self.refused)}
        for name, values in (("latency_ms", self.latencies_s), ("first_ms", self.first_s)):
            values.sort()
            figures |= {f"{name}_{word}": quantile_ms(values, share) for word, share in SHARES}
        return figures


def quantile_ms(ordered: Sequence[float], share: float) -> float:
    """The value below which this share lies, in milliseconds; 0 of none."""
    if not ordered:
        return 0.0
    return round(1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3)


class Connection(asyncio.Protocol):
    """One request after the other."""

    def __init__(
        self,
        job: Job,
        tally: Tally,
        lost: asyncio.Event,
        free: Callable[["Connection"], None],
        gone: Callable[["Connection"], None],
    ) -> None:
        """Is not open yet.

        Args:
            job: what is asked.
            tally: where its answers are counted.
            lost: set when it ends with a request under way; not where requests come at a rate,
                which go on.
            free: called when it has its answer.
            gone: called when it ends there.
        """
        self._job, self._tally, self._lost, self._free, self._gone = job, tally, lost, free, gone
        self._request = job.request()
        self._got = bytearray()
        self._whole: int | None = None
        """Bytes of the answer; 0: it comes in chunks; None: that is not known yet."""
        self._sent_s = self._first_s = self.free_s = 0.0
        self._asking = self._done = False
        self.transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is one by what it does, not by its type.
        self.transport = cast("asyncio.WriteTransport", transport)

    def ask(self) -> None:
        """Send the request."""
        assert self.transport is not None
        self._got.clear()
        self._whole, self._asking = None, True
        self._sent_s = time.monotonic()
        self._first_s = 0.0
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        got = self._got
        got += data
        if self._whole is None:
            head = got.find(b"\r\n\r\n")
            if head < 0:
                return
            length = got.lower().find(b"\r\ncontent-length:", 0, head)
            self._whole = (
                head + 4 + int(got[length + 17 : got.find(b"\r", length + 2)]) if length >= 0 else 0
            )
        if not self._first_s:
            self._first_s = time.monotonic()
        if got.endswith(END_OF_CHUNKS) if self._whole == 0 else len(got) >= self._whole:
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._job.rate_per_s:
            if self._asking and not self._done:
                self._asking = False
                self._tally.wrong(f"the connection ended: {exc}")
            self._gone(self)
        elif not self._done and not self._job.hold:
            self._tally.wrong(f"the connection ended: {exc}")
            self._lost.set()

    def close(self) -> None:
        """Leave."""
        self._done = True
        if self.transport is not None:
            self.transport.close()

    def _end(self) -> None:
        now_s, tally, got = time.monotonic(), self._tally, self._got
        self._asking = False
        self.free_s = now_s
        if got[9:12] != b"200":
            tally.wrong(got[:400].decode(errors="replace"), got[9:12].decode(errors="replace"))
        elif self._whole == 0 and b"data: [DONE]" not in got[-100:]:
            tally.wrong(got[-400:].decode(errors="replace"))
        elif tally.counting:
            tally.latencies_s.append(now_s - self._sent_s)
            tally.first_s.append(self._first_s - self._sent_s)
        if self._done:
            return
        if self._job.pause_s or got[9:12] != b"200":
            pause_s = max(REFUSED_PAUSE_S, self._job.pause_s)
            asyncio.get_running_loop().call_later(pause_s, self._free, self)
        else:
            self._free(self)


class Client:
    """Keeps connections busy, or sends at a rate."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._tally = Tally()
        self._lost = asyncio.Event()
        self._all: list[Connection] = []
        self._free: deque[Connection] = deque()
        """The one that was free last is the next to ask: the others may go."""
        self._rate_per_s = job.rate_per_s
        self._opening: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Ask, and say what came of it."""
        job, tally = self._job, self._tally
        for start in range(0, job.concurrency, CONNECT_AT_ONCE):
            count = min(CONNECT_AT_ONCE, job.concurrency - start)
            await asyncio.gather(*(self._open() for _ in range(count)))
        arriving = asyncio.create_task(self._arrive()) if job.rate_per_s else None
        await _until(job.warm_s, self._lost)
        gc.freeze()
        tally.clear()
        tally.counting = True
        for window in range(job.windows):
            self._rate_per_s = job.rates_per_s[window] if job.rates_per_s else job.rate_per_s
            began_s, cpu_s = time.monotonic(), time.process_time()
            print("begin", flush=True)
            await _until(job.duration_s / job.windows, self._lost)
            took = {"seconds": time.monotonic() - began_s, "cpu_s": time.process_time() - cpu_s}
            print("end", flush=True)
            print(json.dumps({**tally.told(), **took}), flush=True)
            tally.clear()
        if job.hold:
            sys.stdin.readline()
        for each in (arriving, *self._opening):
            if each is not None:
                each.cancel()
        for connection in self._all:
            connection.close()

    async def _open(self) -> None:
        """One more connection, which asks at once."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: Connection(self._job, self._tally, self._lost, self._again, self._forget),
            self._job.host,
            self._job.port,
        )
        self._all.append(connection)
        connection.ask()

    def _again(self, connection: Connection) -> None:
        if self._job.rate_per_s:
            self._free.append(connection)
        else:
            connection.ask()

    def _forget(self, connection: Connection) -> None:
        if connection in self._free:
            self._free.remove(connection)

    async def _arrive(self) -> None:
        """Poisson's arrivals, on time also when they were late to be sent."""
        dice, next_s = random.Random(SEED), time.monotonic()
        for _ in range(self._job.most):
            next_s += dice.expovariate(self._rate_per_s)
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            while self._free and self._free[0].free_s < time.monotonic() - IDLE_S:
                self._free.popleft().close()
            if self._free:
                self._free.pop().ask()
            else:
                task = asyncio.create_task(self._open())
                self._opening.add(task)
                task.add_done_callback(self._opening.discard)


async def _until(seconds: float, lost: asyncio.Event) -> None:
    """Until so much time has passed, or a connection was lost."""
    try:
        async with asyncio.timeout(seconds):
            await lost.wait()
    except TimeoutError:
        return


def main() -> None:
    """One job."""
    job = Job(**json.loads(sys.stdin.readline()))
    uvloop.run(Client(job).run())


if __name__ == "__main__":
    main()
