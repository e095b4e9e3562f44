"""One process of the client of ``bench/served_gpu.py``: the same code asks every server.

The standard library alone.

It reads a job as one line of JSON, says that it is ready, reads when to begin (on the machine's
monotonic clock), and answers with one line: what came of every request. While requests run it keeps
the bytes and when they came, and nothing else: they are read as events afterwards, so that the
client costs the server as little of the machine as possible. Connections are opened before the
beginning.
"""

import asyncio
import gc
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

Reads = list[tuple[float, bytes]]
"""When bytes came, and which."""
END_OF_CHUNKS = b"\r\n0\r\n\r\n"


@dataclass
class Answer:
    """What came of one request; times in seconds since the job's beginning."""

    planned_s: float | None
    """When it was to be sent; None: as soon as a connection was free."""
    sent_s: float
    first_s: float = 0.0
    """The first text came."""
    last_s: float = 0.0
    """The last text came."""
    gaps_s: list[float] = field(default_factory=list[float])
    """Between texts that follow each other."""
    events: int = 0
    """With text."""
    output_tokens: int = 0
    prompt_tokens: int = 0
    """Both as the server counted."""
    trace_id: str = ""
    """Where the server names one."""
    error: str = ""


class Connection(asyncio.Protocol):
    """One connection, for one request at a time."""

    def __init__(self) -> None:
        self.reads: Reads = []
        self._tail = b""
        self._length: int | None = None
        self._done: asyncio.Future[None] | None = None
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    @property
    def is_open(self) -> bool:
        """It can take a request."""
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes) -> Reads:
        """Everything that comes in answer.

        Raises:
            ConnectionError: the connection ended before the answer did.
        """
        assert self._transport is not None
        self.reads, self._tail, self._length = [], b"", None
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._done
        return self.reads

    def data_received(self, data: bytes) -> None:
        self.reads.append((time.monotonic(), data))
        self._tail = (self._tail + data)[-len(END_OF_CHUNKS) :]
        if self._tail == END_OF_CHUNKS or self._has_all():
            self._end(None)

    def _has_all(self) -> bool:
        """An answer that tells its length, as errors do, has come whole."""
        if self._length is None:
            head, found, _ = b"".join(data for _, data in self.reads).partition(b"\r\n\r\n")
            if not found:
                return False
            length = headers_of(head).get("content-length")
            self._length = -1 if length is None else len(head) + 4 + int(length)
        return 0 <= self._length <= sum(len(data) for _, data in self.reads)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(ConnectionError(f"the connection ended: {exc}"))

    def _end(self, error: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)

    def close(self) -> None:
        """End it."""
        if self._transport is not None:
            self._transport.close()


def headers_of(head: bytes) -> dict[str, str]:
    """By their names in small letters."""
    pairs = (line.partition(":") for line in head.decode("latin-1").split("\r\n")[1:])
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def body_of(reads: Reads) -> tuple[int, dict[str, str], Reads]:
    """Status, headers and body of an answer; each piece of the body with the time at which it was
    there whole.
    """
    waiting, status = b"", 0
    headers: dict[str, str] | None = None
    body: Reads = []
    for at_s, data in reads:
        waiting += data
        if headers is None:
            head, found, rest = waiting.partition(b"\r\n\r\n")
            if not found:
                continue
            status, headers, waiting = int(head.split(b" ", 2)[1]), headers_of(head), rest
        if headers.get("transfer-encoding", "").lower() != "chunked":
            body.append((at_s, waiting))
            waiting = b""
            continue
        while b"\r\n" in waiting:
            size, _, rest = waiting.partition(b"\r\n")
            length = int(size.partition(b";")[0], 16)
            if len(rest) < length + 2:
                break
            if length:
                body.append((at_s, rest[:length]))
            waiting = rest[length + 2 :]
    return status, headers or {}, body


def events_of(body: Reads) -> Iterator[tuple[float, str]]:
    """The data of every server-sent event, with the time at which it was there whole."""
    waiting = b""
    for at_s, data in body:
        *whole, waiting = (waiting + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in whole:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield at_s, b"\n".join(lines).decode()


def read_answer(answer: Answer, reads: Reads, began_s: float) -> None:
    """Fill in what the bytes say."""
    status, headers, body = body_of(reads)
    answer.trace_id = headers.get("x-trace-id", "")
    if status != 200:
        answer.error = (
            f"status {status}: {b''.join(data for _, data in body)[:500].decode(errors='replace')}"
        )
        return
    finished = False
    for at_s, data in events_of(body):
        if data == "[DONE]":
            finished = True
            continue
        event = json.loads(data)
        if event.get("error"):
            answer.error = f"in the stream: {json.dumps(event['error'])[:500]}"
            return
        if usage := event.get("usage"):
            answer.output_tokens, answer.prompt_tokens = (
                usage["completion_tokens"],
                usage["prompt_tokens"],
            )
        if any(choice.get("text") for choice in event.get("choices") or ()):
            when_s = at_s - began_s
            if answer.events:
                answer.gaps_s.append(when_s - answer.last_s)
            else:
                answer.first_s = when_s
            answer.last_s = when_s
            answer.events += 1
    if not finished or not answer.events:
        answer.error = f"the stream ended after {answer.events} texts" + (
            "" if finished else ", without [DONE]"
        )


@dataclass(frozen=True)
class Job:
    """What a process is to ask."""

    host: str
    port: int
    path: str
    headers: dict[str, str]
    bodies: list[dict[str, Any]]
    at_s: list[float] | None
    """When each is sent; None: each connection sends the next as soon as it has its answer."""
    connections: int
    """At the beginning; more are opened where ``at_s`` needs them."""
    deadline_s: float
    """For every request."""

    def requests(self) -> list[bytes]:
        """Each as it is sent."""
        made: list[bytes] = []
        for document in self.bodies:
            body = json.dumps(document).encode()
            lines = [
                f"POST {self.path} HTTP/1.1",
                f"host: {self.host}:{self.port}",
                "content-type: application/json",
            ]
            lines += [
                f"content-length: {len(body)}",
                *(f"{name}: {value}" for name, value in self.headers.items()),
            ]
            made.append("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        return made


class Client:
    """Asks what a job says."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._requests = job.requests()
        self._free: list[Connection] = []
        self._began_s = 0.0
        self._answers: list[tuple[Answer, Reads]] = []

    async def connect(self) -> None:
        """Open the connections with which it begins."""
        self._free = [await self._open() for _ in range(self._job.connections)]

    async def _open(self) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(
            Connection, self._job.host, self._job.port
        )
        return connection

    async def run(self, began_s: float) -> None:
        """Ask everything; ``began_s`` is the beginning on the monotonic clock."""
        self._began_s = began_s
        await asyncio.sleep(max(0.0, began_s - time.monotonic()))
        if self._job.at_s is None:
            todo = iter(self._requests)
            await asyncio.gather(
                *(self._one_after_another(todo) for _ in range(self._job.connections))
            )
        else:
            asked: list[asyncio.Task[None]] = []
            for request, at_s in zip(self._requests, self._job.at_s, strict=True):
                await asyncio.sleep(max(0.0, began_s + at_s - time.monotonic()))
                asked.append(asyncio.create_task(self._ask(request, at_s)))
            await asyncio.gather(*asked)

    def answers(self) -> list[Answer]:
        """What came, read as events."""
        for answer, reads in self._answers:
            if not answer.error:
                read_answer(answer, reads, self._began_s)
        return [answer for answer, _ in self._answers]

    async def _one_after_another(self, todo: Iterator[bytes]) -> None:
        for request in todo:
            await self._ask(request, None)

    async def _ask(self, request: bytes, planned_s: float | None) -> None:
        connection = self._free.pop() if self._free else None
        if connection is None or not connection.is_open:
            connection = await self._open()
        answer, reads = Answer(planned_s, time.monotonic() - self._began_s), Reads()
        try:
            async with asyncio.timeout(self._job.deadline_s):
                reads = await connection.ask(request)
        except TimeoutError:
            answer.error = f"no whole answer within {self._job.deadline_s:g} s"
            connection.close()
        except ConnectionError as error:
            answer.error = str(error)
        else:
            self._free.append(connection)
        self._answers.append((answer, reads))


async def work(job: Job) -> dict[str, Any]:
    """Do it, and say what this process itself took meanwhile."""
    client = Client(job)
    await client.connect()
    print("ready", flush=True)
    began_s = float(await asyncio.to_thread(sys.stdin.readline))
    gc.disable()
    cpu_s = time.process_time()
    await client.run(began_s)
    cpu_s = time.process_time() - cpu_s
    return {"answers": [asdict(answer) for answer in client.answers()], "cpu_s": cpu_s}


def main() -> None:
    """One job."""
    job = Job(**json.loads(sys.stdin.readline()))
    print(json.dumps(asyncio.run(work(job))), flush=True)


if __name__ == "__main__":
    main()
