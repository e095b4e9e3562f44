"""Holds requests to the limits of their keys and projects: one call when a request is about to be
made, and one at its end. Nothing is waited for; what other gateways let in is heard beside it
(``exchange``).
"""

import asyncio
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import msgspec
from starlette.types import Scope

from pilotlight.common.clock import Clock
from pilotlight.common.errors import QuotaUsedUp, RateLimited, TokensLimited, TooLarge
from pilotlight.common.messages.limits import LimitTotal
from pilotlight.gateway.edge.client_headers import note_later
from pilotlight.gateway.limits.accounts import Account, Line, Sharing, Taken
from pilotlight.gateway.limits.peers import Peers
from pilotlight.policy.ids import GatewayId
from pilotlight.policy.tenants import Tenant, TenantLimits

PLACE_AGAIN_S = 1.0
"""When one that found too many requests running may come again: nobody knows how long they run."""
FORGET_S = 300.0
"""After which an account that nobody uses is forgotten: all of its minute is paid back."""
_REQUESTS_LEFT, _TOKENS_LEFT = (
    tuple(f"x-ratelimit-{what}-{units}" for what in ("limit", "remaining", "reset"))
    for units in ("requests", "tokens")
)
MAX_TOLD = 500
"""Accounts in one message."""


class Budgets(Protocol):
    """What was used this month (``BudgetBook``)."""

    def knows(self, subject: str) -> bool:
        """It was looked up."""
        ...

    async def learn(self, subject: str) -> None:
        """Look it up; for a short time."""
        ...

    def begin(self, subject: str, tokens: int) -> None:
        """A request may use so many tokens, from now to its end."""
        ...

    def end(self, subject: str, estimated: int, used: int) -> None:
        """It has used this."""
        ...

    def used(self, subject: str) -> int:
        """Tokens of this month, with those that running requests may use."""
        ...


class Admission:
    """One request that was let in."""

    __slots__ = ("_accounts", "_budgets", "_ended", "_limiter", "_taken", "_tokens")

    def __init__(
        self,
        limiter: "Limiter",
        accounts: tuple[Account, ...],
        taken: tuple[Taken, ...],
        tokens: int,
    ) -> None:
        self._limiter = limiter
        self._accounts = accounts
        self._taken = taken
        """Of tokens, by account; none, where rates do not hold."""
        self._tokens = tokens
        self._ended = False

    def end(self, used_tokens: int) -> None:
        """It has ended, and has used this; a second call does nothing."""
        if self._accounts and not self._ended:
            self._ended = True
            self._limiter.ended(self._accounts, self._taken, self._tokens, used_tokens)


class Limiter:
    """The accounts of this gateway."""

    def __init__(self, clock: Clock, budgets: Budgets, gateway_id: GatewayId) -> None:
        self._clock = clock
        self._budgets = budgets
        self._accounts: dict[str, Account] = {}
        self._lives = itertools.count(1)
        self._unlimited = Admission(self, (), (), 0)
        self._turn = 0
        self.peers = Peers(gateway_id, clock.monotonic_s())
        self.sharing = Sharing()
        self.changed = asyncio.Event()
        """There is something to tell."""

    def knows(self, key_id: str, tenant: Tenant) -> bool:
        """Whether all is known that ``admit_known`` looks at."""
        return all(self._budgets.knows(subject) for subject in _budgeted(key_id, tenant))

    async def learn(self, key_id: str, tenant: Tenant) -> None:
        """Look up what is not known of it; for a short time."""
        for subject in _budgeted(key_id, tenant):
            if not self._budgets.knows(subject):
                await self._budgets.learn(subject)

    async def admit(
        self, key_id: str, tenant: Tenant, tokens: int, scope: Scope, *, paced: bool = True
    ) -> Admission:
        """As ``admit_known``, once what is known is enough."""
        await self.learn(key_id, tenant)
        return self.admit_known(key_id, tenant, tokens, scope, paced=paced)

    def check(self, key_id: str, tenant: Tenant, scope: Scope) -> None:
        """Raises, and says in the answer's headers, what ``admit_known`` would for the shortest of
        requests, if that is known; takes nothing.
        """
        if not tenant.limited or not self.knows(key_id, tenant):
            return
        now_s = self._clock.monotonic_s()
        accounts = self._accounts_of(key_id, tenant, now_s)
        for account in accounts:
            if account.limits.tokens_per_month is not None:
                self._check_budget(account, account.limits.tokens_per_month)
        try:
            for account in accounts:
                self._check(account, 1, now_s)
        finally:
            _tell_left(scope, accounts, now_s)

    def admit_known(
        self, key_id: str, tenant: Tenant, tokens: int, scope: Scope, *, paced: bool = True
    ) -> Admission:
        """Let a request in, and say in its answer's headers what is left.

        1. the budgets of the month: what is used up is refused until they are raised
        2. more tokens than a limit has in a minute: it could never be let in
        3. places, requests and tokens of the key, then of its project

        Args:
            key_id: whose request it is.
            tenant: with the limits of both.
            tokens: that it takes, as estimated: its prompts and what it may answer.
            scope: of the request.
            paced: rates and places hold for it; otherwise only budgets, as for lines of batches,
                which run when there is time.

        Raises:
            QuotaUsedUp: 1.
            TooLarge: 2.
            RateLimited: 3.
        """
        if not tenant.limited:
            return self._unlimited
        now_s = self._clock.monotonic_s()
        accounts = self._accounts_of(key_id, tenant, now_s)
        for account in accounts:  # 1
            if account.limits.tokens_per_month is not None:
                self._check_budget(account, account.limits.tokens_per_month)
        taken: tuple[Taken, ...] = ()
        if paced:
            try:
                for account in accounts:
                    self._check(account, tokens, now_s)
                taken = tuple([self._take(account, tokens, now_s) for account in accounts])
            finally:
                _tell_left(scope, accounts, now_s)
            self.changed.set()
        for account in accounts:
            if account.limits.tokens_per_month is not None:
                self._budgets.begin(account.subject, tokens)
        return Admission(self, accounts, taken, tokens)

    def ended(
        self, accounts: tuple[Account, ...], taken: tuple[Taken, ...], tokens: int, used: int
    ) -> None:
        """For ``Admission``: a request has ended.

        Args:
            accounts: that it was charged to.
            taken: its tokens' charges, by account.
            tokens: as estimated.
            used: as it was.
        """
        now_s = self._clock.monotonic_s()
        for account, its in zip(accounts, taken, strict=False):
            account.running -= 1
            account.tokens.correct(its, used, now_s)
            account.changed = True
        for account in accounts:
            if account.limits.tokens_per_month is not None:
                self._budgets.end(account.subject, tokens, used)
        if taken:
            self.changed.set()

    # What the exchange calls.

    def tell(self) -> tuple[LimitTotal, ...]:
        """Accounts that have changed, and some others in turn: a message may be lost."""
        now_s = self._clock.monotonic_s()
        changed = [account for account in self._accounts.values() if account.changed][:MAX_TOLD]
        totals = tuple(account.total(now_s) for account in changed or self._in_turn(now_s))
        if len(changed) == MAX_TOLD or any(account.changed for account in changed):
            self.changed.set()
        return totals

    def hear(self, gateway_id: GatewayId, seq: int, totals: tuple[LimitTotal, ...]) -> None:
        """What another gateway told."""
        now_s = self._clock.monotonic_s()
        for news in self.peers.hear(gateway_id, seq, totals, now_s):
            account = self._accounts.get(news.subject)
            if account is None:
                continue
            account.others_running = self.peers.running(news.subject)
            if news.known:
                account.requests.hear(news.requests, now_s)
                account.tokens.hear(news.tokens, now_s)
            else:
                account.requests.adopt(news.requests, now_s)
                account.tokens.adopt(news.tokens, now_s)

    def look(self, *, connected: bool) -> None:
        """Once a second: who is there, and what nobody uses any more."""
        now_s = self._clock.monotonic_s()
        gone = self.peers.look(now_s, connected=connected)
        self.sharing = Sharing(1 + len(self.peers), cut_off=not connected)
        for subject in [
            subject for subject, account in self._accounts.items() if account.idle(now_s, FORGET_S)
        ]:
            del self._accounts[subject]
        if gone:
            for account in self._accounts.values():
                account.others_running = self.peers.running(account.subject)

    def _in_turn(self, now_s: float) -> Iterator[Account]:
        accounts = [account for account in self._accounts.values() if account.owes(now_s)]
        if not accounts:
            return iter(())
        begin = self._turn % len(accounts)
        self._turn = begin + MAX_TOLD
        return iter(accounts[begin : begin + MAX_TOLD])

    def _accounts_of(self, key_id: str, tenant: Tenant, now_s: float) -> tuple[Account, ...]:
        """Of the key, then of its project: those that have limits."""
        accounts: tuple[Account, ...] = ()
        if tenant.key_limits.any:
            accounts = (self._account(_key(key_id), tenant.key_limits, now_s),)
        if tenant.project_limits.any:
            project = self._account(_project(tenant), tenant.project_limits, now_s)
            accounts = (*accounts, project)
        return accounts

    def _account(self, subject: str, limits: TenantLimits, now_s: float) -> Account:
        account = self._accounts.get(subject)
        if account is None:
            account = self._accounts[subject] = Account(subject, next(self._lives), now_s)
            account.set(limits, now_s)
            account.others_running = self.peers.running(subject)
            for requests, tokens, age_s in self.peers.owed(subject, now_s):
                account.requests.adopt(
                    requests - (limits.requests_per_minute or 0) * age_s / 60, now_s
                )
                account.tokens.adopt(tokens - (limits.tokens_per_minute or 0) * age_s / 60, now_s)
        else:
            account.set(limits, now_s)
        return account

    def _check_budget(self, account: Account, budget: int) -> None:
        if self._budgets.used(account.subject) >= budget:
            raise QuotaUsedUp(
                f"{_named(account)} has used its budget of {budget} tokens this month"
            )

    def _check(self, account: Account, tokens: int, now_s: float) -> None:
        limits = account.limits
        per_minute = limits.tokens_per_minute
        if per_minute is not None and tokens > per_minute:  # 2
            raise TooLarge(
                f"this request may take {tokens} tokens, and {_named(account)} has {per_minute} a minute: shorten it, or "
                "lower max_tokens",
                param="max_tokens",
            )
        if not account.has_place(self.sharing):  # 3
            raise RateLimited(
                f"{_named(account)} may have {limits.concurrent_requests} requests at a time",
                retry_after_s=PLACE_AGAIN_S,
            )
        waits_s = account.requests.wait_s(1, now_s, self.sharing)
        if waits_s:
            raise RateLimited(
                f"Rate limit reached for {_named(account)} on requests per min (RPM): Limit {limits.requests_per_minute}. "
                f"Please try again in {duration(waits_s)}",
                retry_after_s=waits_s,
            )
        waits_s = account.tokens.wait_s(tokens, now_s, self.sharing)
        if waits_s:
            raise TokensLimited(
                f"Rate limit reached for {_named(account)} on tokens per min (TPM): Limit {per_minute}, Requested {tokens}. "
                f"Please try again in {duration(waits_s)}",
                retry_after_s=waits_s,
            )

    def _take(self, account: Account, tokens: int, now_s: float) -> Taken:
        account.changed = True
        account.running += 1
        account.unheard_running.fresh += 1
        account.requests.spend(1, now_s, self.sharing)
        return account.tokens.take(tokens, now_s, self.sharing)


def _key(key_id: str) -> str:
    return f"key/{key_id}"


def _project(tenant: Tenant) -> str:
    return f"project/{tenant.project}"


def _budgeted(key_id: str, tenant: Tenant) -> Iterator[str]:
    """Of a key and its project, what has a budget of the month."""
    if tenant.key_limits.tokens_per_month is not None:
        yield _key(key_id)
    if tenant.project_limits.tokens_per_month is not None:
        yield _project(tenant)


def _named(account: Account) -> str:
    kind, _, name = account.subject.partition("/")
    return "this key" if kind == "key" else f"the project {name}"


class _Left(msgspec.Struct, frozen=True, gc=False):
    """What was left when a request was let in, until its answer begins."""

    requests: int | None
    """The limit; None: there is none."""
    requests_left: int
    requests_reset_s: float
    tokens: int | None
    tokens_left: int
    tokens_reset_s: float

    def __call__(self) -> Sequence[str]:
        """OpenAI's headers."""
        told: list[str] = []
        for names, limit, units, reset_s in (
            (_REQUESTS_LEFT, self.requests, self.requests_left, self.requests_reset_s),
            (_TOKENS_LEFT, self.tokens, self.tokens_left, self.tokens_reset_s),
        ):
            if limit is not None:
                reset = duration(reset_s)
                told += (names[0], str(limit), names[1], str(units), names[2], reset)
        return told


def _tightest(lines: Iterable[Line], now_s: float) -> tuple[int | None, int, float]:
    """The limit of which least is left, what that is, and until when all of it is; None: there is
    none.
    """
    tightest: Line | None = None
    least = 0
    for line in lines:
        if line.limit is not None:
            units = line.left(now_s)
            if tightest is None or units < least:
                tightest, least = line, units
    if tightest is None:
        return None, 0, 0.0
    return tightest.limit, least, tightest.reset_s(now_s)


def _tell_left(scope: Scope, accounts: tuple[Account, ...], now_s: float) -> None:
    """Of the tighter limit of key and project."""
    requests = _tightest([account.requests for account in accounts], now_s)
    tokens = _tightest([account.tokens for account in accounts], now_s)
    note_later(scope, _Left(*requests, *tokens))


def duration(seconds: float) -> str:
    """A time as OpenAI's headers have it: ``17ms``, ``1.5s``, ``6m0s``."""
    if seconds < 1:
        return f"{max(0, round(seconds * 1000))}ms"
    minutes, rest = divmod(seconds, 60)
    if minutes:
        return f"{int(minutes)}m{int(rest)}s"
    return f"{rest:.3f}".rstrip("0").rstrip(".") + "s"
