"""What requests are promised (their model's SLO), and what a step may hold so that it is kept.

Streams that are ahead of what they were promised can wait for a prompt; the more of them run, the
less a prompt may take. So there are three questions:

1. *Who is next?* Who can still have the first token in time. What is late already is late anyway,
   and goes behind; not for ever (``waiting``).
2. *May one more run?* Not where a step of streams alone would take more than a share of the time
   promised for a token: the rest is what prompts live on. One that waits is the sign to the
   scheduler that another instance is needed; one that runs would make all of them late.
3. *How much of prompts fits into this step?* As much as leaves each stream with a lead.

What is not known yet, or was not promised, limits nothing. Neither does a promise that one stream
alone does not keep.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import islice

from pilotlight.engine.core.pace import Pace
from pilotlight.engine.core.request import Request

STREAMS_SHARE = 0.5
"""Of the time promised for a token, what a step of streams alone may take."""
GRACE_TOKENS = 20
"""A stream may be behind by as many, if four times as many are to come: its mean counts."""
LEAST_TOKENS = 256
"""Of prompts in a step, whatever is promised: they end, too."""
TIGHT = 8.0
"""A first token is in danger when what is to run before it takes more than this part of the time
that is left."""
LOOKED_AT = 64
"""Of those that wait: what is behind them is in no step that is planned now."""
DELIVERY_S = 0.010
"""From the end of a step to whoever asked."""


@dataclass(slots=True)
class Promises:
    """Those of one stage's requests."""

    kept: bool
    """``BatchLimits.keep_promises``."""
    pace: Pace = field(default_factory=Pace)

    def in_time(self, request: Request, now_s: float) -> bool:
        """Whether its first token can still come in time."""
        if not self.kept or request.due_s is None:
            return True
        runs_s = (self.pace.prompt_token_s or 0.0) * request.wanted
        return now_s + runs_s + DELIVERY_S <= request.due_s

    def crowded(self, running: int, request: Request) -> bool:
        """Whether those that run would be late for their tokens if this one ran, too."""
        if not self.kept or not running or request.token_s is None:
            return False
        most_s = STREAMS_SHARE * request.token_s
        alone_s, all_s = self.pace.streams_s(1), self.pace.streams_s(running + 1)
        return alone_s is not None and all_s is not None and alone_s <= most_s < all_s

    def prompt_tokens(self, streams: Collection[Request], now_s: float) -> int | None:
        """Tokens of prompts that a step may hold beside streams; None: as many as it can.

        Streams that are late already are not waited for.
        """
        token_s = self.pace.prompt_token_s
        if not self.kept or not token_s:
            return None
        least_s = None
        for stream in streams:
            grace = min(GRACE_TOKENS, (stream.kv_tokens - len(stream.token_ids)) // 4)
            lead_s = stream.lead_s(now_s, grace)
            if lead_s is None or stream.token_s is None or lead_s <= 0.0:
                continue
            lead_s = max(lead_s, stream.token_s)
            least_s = lead_s if least_s is None else min(least_s, lead_s)
        if least_s is None:
            return None
        free_s = least_s - (self.pace.streams_s(len(streams)) or 0.0)
        return max(LEAST_TOKENS, int(free_s / token_s))

    def tight(self, to_run: Iterable[Request], now_s: float) -> bool:
        """Whether a first token is in danger: then prompts are not cut for the streams' sake.

        ``to_run``: prompts, in the order in which they will run.
        """
        token_s = self.pace.prompt_token_s
        if not self.kept or not token_s:
            return False
        runs_s = 0.0
        for request in islice(to_run, LOOKED_AT):
            runs_s += token_s * request.wanted
            if request.due_s is not None and now_s + TIGHT * runs_s > request.due_s:
                return True
        return False
