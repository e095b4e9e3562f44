"""One request on a simulated engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pilotlight.common.messages.engine import Produced, Run
from pilotlight.policy.model import ModelSpec
from pilotlight.policy.request import FinishReason
from pilotlight.worker.engines.sim_tokens import SimTokens


@dataclass(slots=True, kw_only=True)
class SimRequest:
    """What was asked, and how far it has come."""

    run: Run
    position: int
    deadline_s: float
    tokens: SimTokens | None = None
    """Set when its prompt has been worked on."""
    given: list[int] = field(default_factory=list[int])
    """Its output here."""
    full_at: int = 0
    """Position past its last token, however it ends; set with the first one."""

    @property
    def held_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.run.prompt_ids) + self.position

    def read_prompt(self, vocab_size: int) -> None:
        """Its prompt, and the output that it came with, have been worked on."""
        run = self.run
        before = (*run.prompt_ids, *run.output_ids)
        self.tokens = SimTokens.after(run.sampling.seed, before, vocab_size)

    def advance(self, spec: ModelSpec) -> Produced:
        """The next token, and the end if it is the last one."""
        assert self.tokens is not None, "its prompt has been worked on"
        run, position = self.run, self.position
        sampling = run.sampling
        if not self.full_at:
            room = spec.max_context_tokens - len(run.prompt_ids)
            self.full_at = min(sampling.max_tokens, room)
        token_id, logprob = self.tokens.draw(with_logprob=sampling.logprobs)
        if not sampling.ignore_eos and token_id in sampling.stop_token_ids:
            return Produced(
                request_id=run.request_id,
                attempt=run.attempt,
                position=position,
                logprobs=() if sampling.logprobs else None,
                finish=FinishReason.STOP,
            )
        self.position = reached = position + 1
        self.given.append(token_id)
        return Produced(
            request_id=run.request_id,
            attempt=run.attempt,
            position=position,
            token_ids=(token_id,),
            logprobs=None if logprob is None else (logprob,),
            finish=FinishReason.LENGTH if reached >= self.full_at else None,
        )

    def coming(self, at_most: int) -> list[int]:
        """The next tokens, as long as none of them ends it; none of one whose tokens have log
        probabilities.
        """
        sampling = self.run.sampling
        if self.tokens is None or sampling.logprobs:
            return []
        stops = () if sampling.ignore_eos else sampling.stop_token_ids
        return self.tokens.coming(min(at_most, self.full_at - 1 - self.position), stops)

    def advance_by(self, token_ids: Sequence[int]) -> list[Produced]:
        """Take these, which are ``coming``, one by one."""
        assert self.tokens is not None, "they come"
        self.tokens.take_all(token_ids)
        request_id, attempt, first = self.run.request_id, self.run.attempt, self.position
        self.given += token_ids
        self.position += len(token_ids)
        return [
            Produced(
                request_id=request_id, attempt=attempt, position=position, token_ids=(token_id,)
            )
            for position, token_id in enumerate(token_ids, first)
        ]
