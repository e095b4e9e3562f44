"""What the gateway itself keeps of a model's text handling.

Templates and whole tokenizers are in the text helpers alone.
"""

from dataclasses import dataclass

from pilotlight.common.clock import Clock
from pilotlight.text.bundle import TextBundle
from pilotlight.text.decoding import TokenDecoder, decoder_json
from pilotlight.text.reasoning import TemplateReasoning, template_reasoning
from pilotlight.text.template import ChatTemplate
from pilotlight.text.tokenizer import TextTokenizer
from pilotlight.text.tools.probe import TemplateTools, template_tools


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFacts:
    """What a text helper says of a bundle: a function of the bundle alone."""

    decoder: str
    """A ``tokenizer.json`` that can decode, and nothing else."""
    eos_token_ids: tuple[int, ...]
    added_tokens: dict[str, int]
    """Tokens beside the vocabulary proper, by their text."""
    tools: TemplateTools
    """What the template does with tools."""
    reasoning: TemplateReasoning
    """What the template knows of reasoning."""


def facts_of(bundle: TextBundle, tokenizer: TextTokenizer, clock: Clock) -> TextFacts:
    """Compile, probe, and take the tokenizer apart: foreign code runs.

    Raises:
        BadCheckpoint: the template or the tokenizer cannot be used.
        TooLarge: the template writes without end, even of a short conversation.
    """
    template = ChatTemplate(bundle.chat_template, bundle.special_tokens, clock)
    return TextFacts(
        decoder=decoder_json(tokenizer.raw),
        eos_token_ids=tokenizer.eos_token_ids,
        added_tokens=tokenizer.added_tokens,
        tools=template_tools(template, tokenizer),
        reasoning=template_reasoning(bundle.chat_template),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelText:
    """A model's text handling, as far as answers need it."""

    tokenizer: TokenDecoder
    tools: TemplateTools
    reasoning: TemplateReasoning

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an output."""
        return self.tokenizer.eos_token_ids

    @classmethod
    def of(cls, facts: TextFacts) -> "ModelText":
        """Build; takes a moment for large vocabularies, so callers use a thread."""
        return cls(
            tokenizer=TokenDecoder.of(facts.decoder, facts.eos_token_ids, facts.added_tokens),
            tools=facts.tools,
            reasoning=facts.reasoning,
        )
