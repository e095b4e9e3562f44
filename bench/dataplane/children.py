"""Processes of a benchmark that do as they are told: a line of JSON with ``do`` on their input, an
answer of one line on their output.
"""

import asyncio
import json
import select
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import IO, Any

STOP_S = 30.0
ANSWER_S = 300.0
"""The longest that an order may take."""

Order = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


async def obey(orders: Mapping[str, Order]) -> None:
    """Say that it is ready, then obey until the input ends."""
    answer: dict[str, Any] = {}
    while True:
        print(json.dumps(answer), flush=True)
        line = await asyncio.to_thread(sys.stdin.readline)
        if not line.strip():
            return
        order = json.loads(line)
        answer = await orders[order.pop("do")](order)


class Child:
    """One of them, seen from outside."""

    def __init__(self, name: str, command: list[str], log: IO[bytes]) -> None:
        """Start it; its first answer is ``{}``, once it is ready.

        It ends with its input, and so with this process: a signal to all of a terminal's processes
        must not end it half-way.
        """
        self.name = name
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=log, text=True, start_new_session=True
        )

    def tell(self, do: str, **more: Any) -> None:
        """Give it an order; ``heard`` waits for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self._process.stdin.flush()

    def heard(self) -> dict[str, Any]:
        """Its next answer.

        Raises:
            SystemExit: it has ended, or says nothing for ``ANSWER_S``.
        """
        assert self._process.stdout is not None
        # One answer for each order: nothing lies in the buffer from before.
        if not select.select([self._process.stdout], [], [], ANSWER_S)[0]:
            raise SystemExit(
                f"{self.name} has not answered for {ANSWER_S:g} s: see its log (--log FILE)"
            )
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(
                f"{self.name} ended with {self._process.wait(STOP_S)}: see its log (--log FILE)"
            )
        return json.loads(line)

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            # It may be in the middle of an order, whose answer is not awaited any more.
            self._process.kill()
        self.stop()

    def stop(self) -> None:
        """Let it end, or end it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(STOP_S)
        except (subprocess.TimeoutExpired, OSError):
            self._process.kill()
            self._process.wait(STOP_S)
