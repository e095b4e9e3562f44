"""Runs the texts of one request for vectors or scores, each as a request to the fleet."""

import asyncio
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from starlette.types import Scope

from pilotlight.common.errors import InternalError, PilotlightError, QueueFull
from pilotlight.common.telemetry import current_traceparent, log_request
from pilotlight.common.waiting import cancel_all
from pilotlight.gateway.models.catalog import CatalogEntry
from pilotlight.gateway.openai.api import BUSY_RETRY_AFTER_S, Limits
from pilotlight.gateway.openai.asker import Asker
from pilotlight.gateway.openai.choice import ExchangeParts
from pilotlight.gateway.schema.pooling import PooledUsage
from pilotlight.gateway.serving.starts import ModelState
from pilotlight.gateway.serving.token_log import PromptRead
from pilotlight.gateway.serving.token_request import Held, TokenRequest, Tokens, Update
from pilotlight.policy.ids import RequestId
from pilotlight.policy.pooling import Pooled
from pilotlight.policy.request import Sampling

AT_ONCE = 64
"""Texts of one request that are with engines at a time: enough to fill their steps."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One text, encoded, and what is asked of it."""

    token_ids: list[int]
    pooled: Pooled


@dataclass(slots=True)
class _Run:
    """What came of the texts so far."""

    vectors: list[bytes | None]
    held: bool = False
    first_s: float | None = None
    """From arrival to the first answer."""
    device_s: float = 0.0
    """Device-seconds of all texts."""
    failure: Exception | None = None
    todo: list[int] = field(default_factory=list[int])
    """Places of the texts that nobody has begun, the one to be begun next at the end."""


class PooledExchange:
    """One API request. One text's error is that of all."""

    def __init__(
        self,
        parts: ExchangeParts,
        limits: Limits,
        asker: Asker,
        entry: CatalogEntry,
        prompts: Sequence[Prompt],
        scope: Scope,
    ) -> None:
        """Nothing runs yet.

        Args:
            parts: what it works with.
            limits: of all requests.
            asker: whose request it is.
            entry: the model.
            prompts: the texts, encoded.
            scope: of the request, whose answer has not begun.

        Raises:
            QueueFull: this gateway serves as many requests as it may.
        """
        self._parts = parts
        self._limits = limits
        self._asker = asker
        self._model = entry.model
        self._prompts = prompts
        self._scope = scope
        live = parts.requests.live
        if live + min(AT_ONCE, len(prompts)) > limits.max_requests:
            raise QueueFull(
                f"this gateway serves {live} requests, of {limits.max_requests} at most",
                retry_after_s=BUSY_RETRY_AFTER_S,
            )

    @property
    def usage(self) -> PooledUsage:
        """What is billed."""
        tokens = sum(len(prompt.token_ids) for prompt in self._prompts)
        return PooledUsage(prompt_tokens=tokens, total_tokens=tokens)

    async def vectors(self, timeout_s: float | None) -> list[bytes]:
        """The answer to each text, in order; usage is noted.

        Raises:
            PilotlightError: there is none to one of them, or the key's limits let none begin.
        """
        key, tokens = self._asker.key, self.usage.prompt_tokens
        admission = await self._parts.limiter.admit(
            key.key_id, key.tenant, tokens, self._scope, paced=self._asker.paced
        )
        run = _Run([None] * len(self._prompts))
        # Texts of about one length follow each other, and share the steps of engines.
        run.todo = sorted(
            range(len(self._prompts)), key=lambda place: len(self._prompts[place].token_ids)
        )
        status = "cancelled"
        try:
            await self._all(run, min(timeout_s or math.inf, self._limits.request_timeout_s))
            status = "ok"
        except PilotlightError as error:
            status = error.code
            raise
        except Exception:
            status = "internal"
            raise
        finally:
            self._record(run, status)
            admission.end(tokens if status in ("ok", "cancelled") else 0)
        return [vector for vector in run.vectors if vector is not None]

    async def _all(self, run: _Run, timeout_s: float) -> None:
        starts, model = self._parts.starts, self._model
        if starts.readiness(model).state is not ModelState.READY:
            # One waits for a cold start, and not all of them: places to wait are few.
            await self._one(run, run.todo.pop(), timeout_s)
        tasks = [
            asyncio.create_task(self._work(run, timeout_s), name=f"pooling {number}")
            for number in range(min(AT_ONCE, len(run.todo)))
        ]
        try:
            if tasks:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            await cancel_all(tasks)
        if run.failure is not None:
            raise run.failure

    async def _work(self, run: _Run, timeout_s: float) -> None:
        try:
            while run.todo and run.failure is None:
                await self._one(run, run.todo.pop(), timeout_s)
        except Exception as error:
            run.failure = run.failure or error
            raise

    async def _one(self, run: _Run, place: int, timeout_s: float) -> None:
        asker, prompt = self._asker, self._prompts[place]
        first = TokenRequest(
            request_id=asker.request_id,
            model=self._model,
            prompt_ids=array("I", prompt.token_ids),
            sampling=Sampling(seed=0, max_tokens=1, temperature=0.0, pooled=prompt.pooled),
            arrived_s=asker.arrived_s,
            cold_start=asker.cold_start,
            share=asker.key.tenant.share,
            key_id=asker.key.key_id,
            trace_parent=current_traceparent(keep=True),
            deadline_s=asker.arrived_s + timeout_s,
        )
        named = RequestId(f"{asker.request_id}-{place}")
        request = msgspec.structs.replace(first, request_id=named) if place else first

        async def listen(update: Update) -> bool:
            return self._take(run, place, update)

        await self._parts.requests.run(request, listen)
        if run.vectors[place] is None:
            raise InternalError("the engine that serves this model makes no vectors or scores")

    def _take(self, run: _Run, place: int, update: Update) -> bool:
        match update:
            case Held():
                run.held = True
            case Tokens(tokens, read, device_s):
                # It has one. Its end, if that comes after it, says the same again.
                run.device_s += device_s if tokens else 0.0
                self._took(run, place, read)
        return False

    def _took(self, run: _Run, place: int, read: PromptRead | None) -> None:
        if read is not None and read.vector:
            run.vectors[place] = read.vector
        if run.first_s is None:
            model = self._model
            run.first_s = self._parts.clock.monotonic_s() - self._asker.arrived_s
            met = run.first_s * 1000 <= model.slo.ttft_ms
            self._parts.measures.first_token(model.name, met=met)

    def _record(self, run: _Run, status: str) -> None:
        asker, name, tokens = self._asker, self._model.name, self.usage.prompt_tokens
        self._parts.usage.record(
            model=name,
            key_id=asker.key.key_id,
            request_id=asker.request_id,
            prompt_tokens=tokens,
            output_tokens=0,
            status=status,
            device_s=run.device_s,
        )
        self._parts.measures.finished(name, status, tokens, 0, run.first_s, held=run.held)
        log_request(
            "request done",
            "request_done",
            request_id=asker.request_id,
            model=name,
            status=status,
            texts=len(self._prompts),
            held=run.held,
            prompt_tokens=tokens,
            first_token_s=run.first_s,
            elapsed_s=self._parts.clock.monotonic_s() - asker.arrived_s,
        )
