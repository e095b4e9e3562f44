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

    def advance(self, spec: ModelSpec) -> Produced:
        """The next token, and the end if it is the last one."""
        assert self.tokens is not None, "its prompt has been worked on"
        sampling = self.run.sampling
        token_id, logprob = self.tokens.next()
        self.tokens.take(token_id)
        position, stops = (
            self.position,
            not sampling.ignore_eos and token_id in sampling.stop_token_ids,
        )
        self.position += not stops
        self.given += [] if stops else [token_id]
        total = len(self.run.prompt_ids) + self.position
        full = self.position >= sampling.max_tokens or total >= spec.max_context_tokens
        return Produced(
            request_id=self.run.request_id,
            attempt=self.run.attempt,
            position=position,
            token_ids=() if stops else (token_id,),
            logprobs=(() if stops else (logprob,)) if sampling.logprobs else None,
            finish=FinishReason.STOP if stops else FinishReason.LENGTH if full else None,
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
