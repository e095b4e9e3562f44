"""How many of a model's requests kept its SLO."""

from dataclasses import dataclass


@dataclass(slots=True)
class Attained:
    """Counts of one model within some time.

    A first token is in time when it came within TTFT of the request's arrival; an answer is when
    its tokens after the first came within TPOT each, in the mean. Answers of one token, and those
    that failed or whose clients left, are not counted.
    """

    first_tokens: int = 0
    first_tokens_met: int = 0
    answers: int = 0
    answers_met: int = 0

    def add(self, other: "Attained") -> None:
        """Count those of another time, too."""
        self.first_tokens += other.first_tokens
        self.first_tokens_met += other.first_tokens_met
        self.answers += other.answers
        self.answers_met += other.answers_met
