"""One request on a simulated engine."""

from dataclasses import dataclass, field

from pilotlight.common.messages.engine import Produced, RequestReleased, Run
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

    def released(self) -> RequestReleased:
        """Where it stands."""
        run = self.run
        return RequestReleased(
            instance_id=run.instance_id,
            request_id=run.request_id,
            attempt=run.attempt,
            output_ids=[*run.output_ids, *self.given],
        )
