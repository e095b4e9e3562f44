"""How long steps take, learned from those that ran."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from pilotlight.engine.core.batch import Batch

SAMPLES = 15
"""The last ones count, by their median: one that compiled or captured is none of it."""
LEAST_STREAMS = 8
"""Of a step that tells what a stream costs: beside fewer it is lost in what each step costs."""
STREAM_TOKENS = 128
"""A stream costs as much as so many tokens of context, beside its own."""
LEAST_PROMPT_TOKENS = 512
"""Of a step that tells what a prompt's token costs: a short prompt's step is its launches."""
DOUBLE_TOKENS = 12_000
"""A prompt's token that attends to so many costs twice what one costs that attends to none."""
FORGET = 1.0005
"""What a step costs at least is forgotten at this rate, should a slower machine be the truth."""

PLANNING_S = 0.006
"""So long before a step ends the next one is planned; sooner, where the host takes longer to launch
one with prompts: the tokens are handed out behind that."""
UNSURE_SHARE = 0.1
"""Of a step's time: as much sooner may it end."""


@dataclass(frozen=True, slots=True)
class Course:
    """Of a step that the device has begun, on the engine's clock."""

    ends_s: float
    """When it is expected to end."""
    plan_s: float
    """When what follows is to be planned."""


def prompt_work(start: int, count: int) -> float:
    """A prompt's tokens [start, start + count) as so many that attend to nothing."""
    return count * (1.0 + (start + count / 2) / DOUBLE_TOKENS)


class Pace:
    """One stage's.

    A step of streams alone is taken to cost something at least, and something for each of them and
    each token of their contexts; one with prompts, something more for each of their tokens, and no
    less than its launches.
    """

    __slots__ = (
        "_ended_s",
        "_launches",
        "_launches_s",
        "_least_s",
        "_prompt",
        "_prompt_token_s",
        "_recent",
        "_stream",
        "_stream_token_s",
    )

    def __init__(self) -> None:
        self._least_s: float | None = None
        self._recent: deque[float] = deque(maxlen=SAMPLES)
        self._stream: deque[float] = deque(maxlen=SAMPLES)
        self._prompt: deque[float] = deque(maxlen=SAMPLES)
        self._launches: deque[float] = deque(maxlen=SAMPLES)
        self._ended_s: float | None = None
        # Asked for again and again while one step is planned.
        self._stream_token_s = self._launches_s = 0.0
        self._prompt_token_s: float | None = None

    def ran(self, batch: Batch, began_s: float, ended_s: float) -> None:
        """Learns from a step.

        Args:
            batch: what it ran.
            began_s: its turn; streams have waited since the step before had ended.
            ended_s: its tokens were there.
        """
        prompts = [one for one in batch.segments if one.count > 1]
        contexts = [one.stop for one in batch.segments if one.count == 1]
        before_s = self._ended_s if contexts and self._ended_s is not None else began_s
        seconds = ended_s - before_s
        self._ended_s = ended_s
        if prompts:
            self._with_prompts(
                sum(one.count for one in prompts),
                sum(prompt_work(one.start, one.count) for one in prompts),
                seconds,
                self.streams_s(contexts) or 0.0,
            )
        elif contexts:
            self._recent.append(seconds)
            usual_s = median(self._recent)
            least_s = usual_s if self._least_s is None else self._least_s * FORGET
            self._least_s = min(usual_s, least_s)
            if len(contexts) >= LEAST_STREAMS:
                beyond_s = max(0.0, seconds - self._least_s)
                self._stream.append(beyond_s / _stream_work(contexts))
                self._stream_token_s = median(self._stream)

    def _with_prompts(self, tokens: int, work: float, seconds: float, streams_s: float) -> None:
        if tokens >= LEAST_PROMPT_TOKENS:
            self._prompt.append(max(0.0, seconds - streams_s) / work)
            self._prompt_token_s = sorted(self._prompt)[len(self._prompt) // 4]
        else:
            self._launches.append(seconds)
            self._launches_s = median(self._launches)

    def streams_s(self, contexts: Iterable[int]) -> float | None:
        """Seconds of a step of streams with contexts of so many tokens; None: not known yet."""
        if self._least_s is None:
            return None
        if not self._stream_token_s:
            return self._least_s
        return self._least_s + self._stream_token_s * _stream_work(contexts)

    def step_s(self, batch: Batch) -> float | None:
        """Seconds of a step; None: not known yet."""
        contexts = [one.stop for one in batch.segments if one.count == 1]
        prompts = [one for one in batch.segments if one.count > 1]
        streams_s = self.streams_s(contexts) if contexts else 0.0
        if streams_s is None or not prompts:
            return streams_s
        if not self._prompt_token_s:
            return None
        work = sum(prompt_work(one.start, one.count) for one in prompts)
        return max(streams_s + self._prompt_token_s * work, self._launches_s)

    def course_of(self, batch: Batch, now_s: float) -> Course | None:
        """Of a step that begins now; None: not known yet."""
        step_s = self.step_s(batch)
        if step_s is None:
            return None
        ends_s = now_s + step_s
        before_s = UNSURE_SHARE * step_s + max(PLANNING_S, self.launches_s)
        return Course(ends_s, ends_s - before_s)

    @property
    def launches_s(self) -> float:
        """Seconds of a step with prompts at least, as far as that is known."""
        return self._launches_s

    @property
    def prompt_token_s(self) -> float | None:
        """Seconds that a token of a prompt that attends to nothing adds to a step; None: not known
        yet.

        The lower quartile: steps with few tokens are longer than those say.
        """
        return self._prompt_token_s


def _stream_work(contexts: Iterable[int]) -> float:
    """Streams as so many tokens of context."""
    return sum(STREAM_TOKENS + context for context in contexts)
