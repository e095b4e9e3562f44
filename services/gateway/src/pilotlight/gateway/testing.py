"""Doubles for tests of the gateway: a catalog of fixed models, text helpers, keys, usage.

All of them stand behind the real interfaces.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pilotlight.common.clock import Clock
from pilotlight.common.errors import Forbidden, Unauthorized
from pilotlight.gateway.auth import KeyInfo
from pilotlight.gateway.models.catalog import CatalogEntry
from pilotlight.gateway.tenants.keys import Role
from pilotlight.gateway.texts.model_text import ModelText, facts_of
from pilotlight.gateway.texts.process import HelperLauncher, Launched
from pilotlight.policy.access import Access, KeyScope
from pilotlight.policy.ids import (
    Digest,
    ModelName,
)
from pilotlight.policy.model import Dtype, Model, ScalingBounds, Slo
from pilotlight.policy.tenants import NOBODY
from pilotlight.policy.testing import tiny_spec
from pilotlight.text.bundle import TextBundle
from pilotlight.text.tokenizer import TextTokenizer

DIGEST = Digest("d" * 64)
API_KEY = "pl-inference-for-tests"
ADMIN_KEY = "pl-admin-for-tests"
ELSEWHERE_KEY = "pl-inference-for-other-models"
CHAT_KEY = "pl-inference-for-chats"
LIMITED_KEY = "pl-inference-with-limits"
TEXT_HELPER_MEMORY_BYTES = 512 * 1024 * 1024
CREATED_UNIX_S = 1_760_000_000


def model_of(
    name: str, *, vocab_size: int, max_context_tokens: int = 4096, ttft_ms: float = 1000.0
) -> Model:
    """A registered model of no size."""
    spec = tiny_spec(
        hidden_size=8,
        intermediate_size=16,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        vocab_size=vocab_size,
        max_context_tokens=max_context_tokens,
        tied_embeddings=True,
        part_bytes=(64, 64, 64, 64),
    )
    return Model(
        name=ModelName(name),
        uri=f"file:///models/{name}",
        revision=None,
        source_version="1",
        digest=DIGEST,
        text_digest=DIGEST,
        dtype=Dtype.FLOAT32,
        spec=spec,
        slo=Slo(ttft_ms=ttft_ms, tpot_ms=50.0),
        scaling=ScalingBounds(),
    )


def entry_of(
    name: str, bundle: TextBundle, clock: Clock, *, max_context_tokens: int = 4096
) -> CatalogEntry:
    """A model with its text."""
    text = ModelText.of(facts_of(bundle, TextTokenizer(bundle), clock))
    model = model_of(
        name, vocab_size=text.tokenizer.vocab_size, max_context_tokens=max_context_tokens
    )
    model = replace(model, text_digest=bundle.digest())
    return CatalogEntry(model=model, text=text, created_unix_s=CREATED_UNIX_S)


KEPT_HELPERS = 3
"""As many as one gateway starts: two that work, and one more."""


class ReservedHelpers:
    """Text helpers that one test leaves to the next: starting a process takes longer than most
    tests.
    """

    def __init__(self) -> None:
        self._launcher = HelperLauncher(TEXT_HELPER_MEMORY_BYTES)
        self._idle: list[Launched] = []

    def launch(self) -> Launched:
        """One that is idle, or a new one."""
        while self._idle:
            launched = self._idle.pop()
            if launched.process.poll() is None:
                return launched
        return self._launcher.launch()

    def take_back(self, launched: Launched) -> None:
        """Keep it, or end it where one gateway's are kept already: tests count their own."""
        if len(self._idle) < KEPT_HELPERS:
            self._idle.append(launched)
        else:
            self._launcher.take_back(launched)


RESERVED_HELPERS = ReservedHelpers()


class KnownModels:
    """A catalog of fixed entries."""

    def __init__(self, entries: Iterable[CatalogEntry]) -> None:
        self._entries: dict[str, CatalogEntry] = {entry.model.name: entry for entry in entries}

    def get(self, name: str) -> CatalogEntry | None:
        """One model, or None."""
        return self._entries.get(name)

    async def find(self, name: str) -> CatalogEntry | None:
        """One model, or None."""
        return self.get(name)

    def names(self) -> tuple[str, ...]:
        """Every model's name, sorted."""
        return tuple(sorted(self._entries))


class FixedKeys:
    """Knows one key of each role, one for other models than there are, one for chats, and one with
    limits.
    """

    def __init__(self) -> None:
        self.revoked = False
        self.scope = KeyScope()
        """Of the key whose lines run later."""
        self.tenant = NOBODY
        """Of the key with limits."""

    async def require(self, headers: Mapping[str, str], role: Role) -> KeyInfo:
        """As ``Authenticator.require``."""
        keys: dict[str, tuple[Role, KeyScope]] = {
            API_KEY: ("inference", KeyScope()),
            ADMIN_KEY: ("admin", KeyScope()),
            ELSEWHERE_KEY: ("inference", KeyScope(models=("elsewhere",))),
            CHAT_KEY: ("inference", KeyScope(routes=("/v1/chat",))),
            LIMITED_KEY: ("inference", KeyScope()),
        }
        presented = headers.get("authorization", "").removeprefix("Bearer ")
        found = keys.get(presented)
        if found is None:
            raise Unauthorized
        its_role, scope = found
        if its_role != role:
            raise Forbidden
        if presented == LIMITED_KEY:
            return KeyInfo("key-limited", role, "test", tenant=self.tenant)
        return KeyInfo(f"key-{role}", role, "test", Access(key=scope))

    async def of_key(self, key_id: str, role: Role) -> KeyInfo:
        """As ``Authenticator.of_key``: the one key of the role, until ``revoked``."""
        if self.revoked or key_id != f"key-{role}":
            raise Unauthorized
        return KeyInfo(key_id, role, "test", Access(key=self.scope))


@dataclass(slots=True)
class NotedUsage:
    """Keeps usage rows in memory."""

    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def meter(self, **_: Any) -> None:
        """As ``UsageRecorder.meter`` without a journal."""

    def record(self, **row: Any) -> None:
        """As ``UsageRecorder.record``."""
        assert row.pop("meter", None) is None
        self.rows.append(row)


class KnownBudgets:
    """Counts what is used in memory, from what a test says it was."""

    def __init__(self) -> None:
        self.used_before: dict[str, int] = {}
        self.learned: set[str] = set()

    def knows(self, subject: str) -> bool:
        """As ``Budgets.knows``."""
        return subject in self.learned

    async def learn(self, subject: str) -> None:
        """As ``Budgets.learn``."""
        self.learned.add(subject)

    def begin(self, subject: str, tokens: int) -> None:
        """As ``Budgets.begin``."""
        self.used_before[subject] = self.used_before.get(subject, 0) + tokens

    def end(self, subject: str, estimated: int, used: int) -> None:
        """As ``Budgets.end``."""
        self.used_before[subject] += used - estimated

    def used(self, subject: str) -> int:
        """As ``Budgets.used``."""
        return self.used_before.get(subject, 0)


class NoDecisions:
    """A scheduler that decided nothing."""

    async def decisions(self, model: str | None, limit: int) -> list[dict[str, Any]]:
        """None."""
        return []
