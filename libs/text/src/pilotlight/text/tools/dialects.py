r"""How models write calls of tools: a table.

What a model's template writes is read back to find its row (``probe``).

::

    hermes   <tool_call>\n{"name": "f", "arguments": {...}}\n</tool_call>    Hermes 2 and 3, Qwen 2.5, Qwen 3
    mistral  [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]           Mistral 7B v0.3 to Mistral Small 3
    llama    {"name": "f", "parameters": {...}}                              Llama 3.1 and 3.2, with or without <|python_tag|>
    plain    {"name": "f", "arguments": {...}}                               models that know no tools, held to it by a grammar
"""

from dataclasses import dataclass

ARGUMENT_KEYS = ("arguments", "parameters")
"""Names of the member that holds a call's arguments. Each is taken from every model: they mix them
up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDialect:
    """One way of writing calls.

    A call is always a JSON object with the function's name and its arguments.
    """

    name: str
    opening: str = ""
    """The marker before calls; empty for none. May be a special token of the tokenizer, or plain
    text."""
    closing: str = ""
    """The marker after each call; empty for none."""
    array: bool = False
    """One marker, then a JSON array of calls."""
    unmarked: bool = False
    """An answer that begins with ``{`` is a call without a marker, if it names a known function."""
    arguments_key: str = "arguments"
    """As the model has learned it."""
    several: bool = True
    """Whether the model's template can write more than one call in an answer."""
    max_id_chars: int | None = None
    """Templates of this dialect take only ids of this number of letters and digits."""

    @property
    def markers(self) -> tuple[str, ...]:
        """What must be seen in the text, though it may be special tokens."""
        return tuple(marker for marker in (self.opening, self.closing) if marker)


HERMES = ToolDialect(name="hermes", opening="<tool_call>", closing="</tool_call>")
MISTRAL = ToolDialect(name="mistral", opening="[TOOL_CALLS]", array=True, max_id_chars=9)
LLAMA = ToolDialect(
    name="llama", opening="<|python_tag|>", unmarked=True, arguments_key="parameters", several=False
)
PLAIN = ToolDialect(name="plain", unmarked=True, several=False)

DIALECTS = (HERMES, MISTRAL, LLAMA)
"""Those that templates are held against, in this order: an unmarked one last."""
