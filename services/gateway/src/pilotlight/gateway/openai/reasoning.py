"""Reasoning in requests: whether the model is to think, and how its answer is read then."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from pilotlight.common.errors import BadRequest
from pilotlight.gateway.schema.requests import ChatRequest
from pilotlight.gateway.texts.model_text import ModelText
from pilotlight.text.reasoning import ReasoningParser, ReasoningTags, TemplateReasoning

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
TAIL_TOKENS = 8
"""The prompt's last tokens, in which an opening tag would be."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request says: whether the model is to think, and how much; None: nothing."""

    param: str
    enabled: bool | None = None
    effort: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningUse:
    """How one answer's reasoning is read. Off: it has none."""

    tags: ReasoningTags | None = None
    begun: bool = False
    """The prompt ends with the opening tag."""

    def parser(self) -> ReasoningParser | None:
        """Reads one answer; None when there is nothing to read."""
        return None if self.tags is None else ReasoningParser(self.tags, begun=self.begun)


NO_REASONING = ReasoningUse()


def reasoning_use(text: ModelText, prompt_ids: Sequence[int], *, held: bool) -> ReasoningUse:
    """How the answer to a prompt is read; ``held`` is one that a grammar holds to its form from its
    first token: it has no reasoning.
    """
    tags = text.reasoning.tags
    if tags is None or held:
        return NO_REASONING
    tail = text.tokenizer.decode(prompt_ids[-TAIL_TOKENS:], skip_special_tokens=False)
    return ReasoningUse(tags=tags, begun=tail.rstrip().endswith(tags.opening))


def reasoning_variables(request: ChatRequest, known: TemplateReasoning) -> dict[str, Any]:
    """What the chat template is told of reasoning.

    Raises:
        BadRequest: what is asked for makes no sense, or the model has no switch for it.
    """
    told: dict[str, Any] = {}
    for asked in _asked(request):
        told |= _told(asked, known, request.model)
    return told


def _told(asked: Asked, known: TemplateReasoning, model: str) -> dict[str, Any]:
    if asked.effort is not None and "reasoning_effort" in known.switches:
        return {"reasoning_effort": asked.effort}
    for switch in ("enable_thinking", "thinking"):
        if switch in known.switches:
            return {switch: asked.enabled}
    # A model that always thinks does what is asked for, and so does one that never does.
    if asked.enabled != (known.tags is not None):
        raise BadRequest(
            f"{asked.param}: the chat template of {model} has no switch for reasoning: leave it out",
            param=asked.param,
        )
    return {}


def _asked(request: ChatRequest) -> list[Asked]:
    asked: list[Asked] = []
    if request.enable_thinking is not None:
        asked.append(_switch("enable_thinking", request.enable_thinking))
    if request.thinking is not None:
        asked.append(_switch("thinking", request.thinking))
    if request.reasoning_effort is not None:
        asked.append(_effort("reasoning_effort", request.reasoning_effort))
    if request.reasoning is not None:
        asked += _reasoning(request.reasoning)
    if len({one.enabled for one in asked}) > 1:
        raise BadRequest(
            f"{asked[0].param} and {asked[1].param} contradict each other", param=asked[1].param
        )
    return asked


def _switch(param: str, value: object) -> Asked:
    """A boolean, or Anthropic's object."""
    if isinstance(value, bool):
        return Asked(param, enabled=value)
    kind = _members(value).get("type")
    if kind not in ("enabled", "disabled"):
        raise BadRequest(f"{param} is true, false or of type enabled or disabled", param=param)
    return Asked(param, enabled=kind == "enabled")


def _effort(param: str, value: object) -> Asked:
    if value not in EFFORTS:
        raise BadRequest(f"{param} is one of {', '.join(EFFORTS)}", param=param)
    return Asked(param, enabled=value != "none", effort=str(value))


def _reasoning(value: object) -> list[Asked]:
    """The Responses API's object, which others use too."""
    members = _members(value)
    if unknown := members.keys() - {"effort", "enabled", "summary", "generate_summary"}:
        raise BadRequest(f"reasoning.{min(unknown)[:64]} is not supported", param="reasoning")
    if members.get("effort") is not None:
        return [_effort("reasoning.effort", members["effort"])]
    if members.get("enabled") is not None:
        return [_switch("reasoning.enabled", members["enabled"])]
    return []


def _members(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
