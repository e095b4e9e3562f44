"""Grammars on llguidance: compiling, and what a matcher allows."""

import json
from typing import TYPE_CHECKING, Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from pilotlight.engine.errors import BadRequest
from pilotlight.policy.request import Grammar, GrammarKind, Vocabulary

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_GRAMMAR_CHARS = 256 * 1024
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,20}"
"""Between the parts of a JSON text that may have blanks. Bounded: a model that has nothing to say
would write them for ever."""
_GUIDANCE = "x-guidance"
"""The member of a schema in which the library is told how its JSON is written."""
_LIMITS = LLParserLimits(
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""Of one token's work some milliseconds; what has no limit here is compiled in a process that does.
"""


class Lexicon:
    """A model's tokens, as llguidance wants them."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        """Reads the tokenizer; takes a second for a vocabulary of 150,000 tokens.

        Raises:
            BadRequest: this tokenizer cannot be used for grammars.
        """
        try:
            with open(vocabulary.path, encoding="utf-8") as file:
                text = file.read()
            self.tokenizer = LLTokenizer(
                text, n_vocab=vocab_size, eos_token=list(vocabulary.eos_token_ids) or None
            )
        except (OSError, ValueError) as error:
            raise BadRequest(
                f"this model's tokenizer cannot be used for grammars: {error}"
            ) from error
        self.mask_bytes = (vocab_size + 7) // 8
        self._ends = bytearray(self.mask_bytes)
        for token_id in self.tokenizer.eos_tokens:
            self._ends[token_id // 8] |= 1 << token_id % 8

    def without_ends(self, mask: bytes) -> bytes:
        """A mask without the tokens that end an output."""
        allowed = bytearray(mask[: self.mask_bytes])
        for index, ends in enumerate(self._ends):
            if ends:
                allowed[index] &= ~ends
        return bytes(allowed)


def compile_grammar(lexicon: Lexicon, grammar: Grammar) -> LLMatcher:
    """A matcher at the beginning of an output.

    Raises:
        BadRequest: the grammar is wrong, or too large.
    """
    try:
        matcher = LLMatcher(lexicon.tokenizer, _translated(grammar), log_level=0, limits=_LIMITS)
    except ValueError as error:
        raise BadRequest(f"the {grammar.kind.value} grammar is not valid: {error}") from error
    if matcher.is_error():
        raise BadRequest(f"the {grammar.kind.value} grammar cannot be used: {matcher.get_error()}")
    return matcher


def _translated(grammar: Grammar) -> str:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(
                grammar.text, overrides=_whitespace(grammar.text)
            )
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.text)
        case GrammarKind.CHOICE:
            try:
                choices = msgspec.json.decode(grammar.text, type=list[str])
            except (msgspec.DecodeError, RecursionError) as error:
                raise ValueError(f"a choice is a JSON array of strings: {error}") from error
            if not choices:
                raise ValueError("a choice is a JSON array of at least one string")
            return LLMatcher.grammar_from_lark(
                "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
            )


def _whitespace(schema: str) -> "JsonCompileOptions":
    """What stands between the parts of a schema's JSON: nothing, unless the schema says otherwise.

    Raises:
        ValueError: the schema is no JSON object, or what it says of this is none.
    """
    try:
        asked = msgspec.convert(
            msgspec.json.decode(schema, type=dict[str, Any]).get(_GUIDANCE, {}), dict[str, Any]
        )
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(
            f"a JSON schema is a JSON object, and so is its {_GUIDANCE}: {error}"
        ) from error
    if asked.get("whitespace_pattern") is not None:
        return {}
    return (
        {"whitespace_pattern": _WHITESPACE}
        if asked.get("whitespace_flexible") is True
        else {"whitespace_flexible": False}
    )
