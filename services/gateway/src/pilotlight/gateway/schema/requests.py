"""Bodies of requests to ``/v1``, decoded strictly (``schema.decoding``).

Fields of this API or of other servers that would change the answer, and that this server does not
support, are declared in ``NotSupported`` with any type, so that a value other than "off" can be
refused by name. Unknown fields are ignored, as clients send many that change nothing.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pilotlight.text.stops import MAX_STOP_CHARS, MAX_STOPS

MAX_INT32 = 2**31 - 1
MAX_TOOLS = 128

Temperature = Annotated[float, Meta(ge=0, le=2, description="0 is greedy.")]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=MAX_INT32, description="0 or -1 switches it off.")]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenLimit = Annotated[int, Meta(ge=1, le=MAX_INT32)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_INT32)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
ModelName = Annotated[
    str,
    Meta(max_length=256, description="A model or an alias; left out, the gateway's default model."),
]
WhitespacePattern = Annotated[
    str,
    Meta(max_length=1024, description="A regular expression: what may stand between JSON's parts."),
]


class NotSupported(msgspec.Struct, kw_only=True):
    """Fields that only take the value that switches them off: first OpenAI's, then vLLM's, then
    those of other servers.
    """

    best_of: Any = None
    echo: Any = None
    suffix: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    add_special_tokens: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    cache_salt: Any = None
    chat_template: Any = None
    detokenize: Any = None
    documents: Any = None
    early_stopping: Any = None
    include_reasoning: Any = None
    kv_transfer_params: Any = None
    length_penalty: Any = None
    logits_processors: Any = None
    priority: Any = None
    prompt_embeds: Any = None
    prompt_logprobs: Any = None
    return_token_ids: Any = None
    return_tokens_as_token_ids: Any = None
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    structural_tag: Any = None
    thinking_token_budget: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None

    ebnf: Any = None
    grammar: Any = None
    json_schema: Any = None
    lora_path: Any = None
    mirostat: Any = None
    no_repeat_ngram_size: Any = None
    no_stop_trim: Any = None
    regex: Any = None
    repeat_penalty: Any = None
    stop_regex: Any = None
    tfs_z: Any = None
    top_a: Any = None
    typical_p: Any = None


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream carries beside the text."""

    include_usage: bool = False


class TextFormat(msgspec.Struct, tag_field="type", tag="text", kw_only=True):
    """Free text."""


class JsonObjectFormat(msgspec.Struct, tag_field="type", tag="json_object", kw_only=True):
    """Any JSON object."""


class NamedSchema(msgspec.Struct, kw_only=True):
    """A JSON schema; it is always followed strictly."""

    name: str = ""
    description: str | None = None
    schema: dict[str, Any]
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema", kw_only=True):
    """JSON of a schema."""

    json_schema: NamedSchema


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's name for the same and more; one of these, and for JSON how its parts are set apart."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=4096)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: WhitespacePattern | None = None
    disable_any_whitespace: (
        Annotated[bool, Meta(description="False: blanks may stand between the parts of JSON.")]
        | None
    ) = None
    disable_fallback: bool | None = None
    disable_additional_properties: Literal[False] | None = None


class CommonRequest(NotSupported, kw_only=True):
    """What both kinds of completion take."""

    model: ModelName = ""
    n: Annotated[int, Meta(ge=1, le=MAX_INT32, description="Answers to each prompt.")] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    seed: Seed | None = None
    stop: Stops | None = None
    max_tokens: TokenLimit | None = None
    ignore_eos: bool | None = None
    timeout_s: (
        Annotated[float, Meta(gt=0, description="Seconds within which the whole answer is wanted.")]
        | None
    ) = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: (
        Annotated[
            dict[int, Annotated[float, Meta(ge=-100, le=100)]],
            Meta(max_length=1024, description="By token id."),
        ]
        | None
    ) = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_INT32)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Meta(min_length=1, max_length=4096)] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: WhitespacePattern | None = None
    include_stop_str_in_output: (
        Annotated[bool, Meta(description="The text ends with the stop string that ended it.")]
        | None
    ) = None
    user: str | None = None


class TextPart(msgspec.Struct, tag_field="type", tag="text", kw_only=True):
    """A part of a message's content; text is the only kind."""

    text: str


class GivenFunction(msgspec.Struct, kw_only=True):
    """What was called in an earlier turn."""

    name: Name
    arguments: Annotated[str, Meta(description="The text of a JSON object.")]


class GivenCall(msgspec.Struct, kw_only=True):
    """A call of an earlier turn, as it was answered."""

    id: Name
    type: Literal["function"] = "function"
    function: GivenFunction


class ChatMessage(msgspec.Struct, kw_only=True):
    """One turn of a conversation. What a tool answers has the role ``tool``."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[GivenCall] | None = None
    tool_call_id: str | None = None
    function_call: Any = None
    reasoning_content: (
        Annotated[str, Meta(description="What the assistant thought, for templates that show it.")]
        | None
    ) = None


class FunctionSpec(msgspec.Struct, kw_only=True):
    """A function that the model may call."""

    name: Annotated[str, Meta(description="1 to 64 letters, digits, underscores and hyphens.")]
    description: str | None = None
    parameters: (
        Annotated[dict[str, Any], Meta(description="The JSON schema of its arguments, an object.")]
        | None
    ) = None
    strict: Annotated[bool, Meta(description="Arguments always follow the schema.")] | None = None


class FunctionTool(msgspec.Struct, tag_field="type", tag="function", kw_only=True):
    """A tool; functions are the only kind."""

    function: FunctionSpec


class NamedFunction(msgspec.Struct, kw_only=True):
    """Which function."""

    name: Name


class NamedChoice(msgspec.Struct, tag_field="type", tag="function", kw_only=True):
    """This function must be called."""

    function: NamedFunction


class ChatRequest(CommonRequest, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: Annotated[bool, Meta(description="False: one call at most.")] | None = None
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    add_generation_prompt: (
        Annotated[bool, Meta(description="False: the prompt ends after the last message.")] | None
    ) = None
    continue_final_message: (
        Annotated[
            bool, Meta(description="The answer goes on with the last message, the assistant's.")
        ]
        | None
    ) = None
    chat_template_kwargs: (
        Annotated[dict[str, Any], Meta(description="Variables of the chat template.")] | None
    ) = None
    reasoning_effort: (
        Annotated[Any, Meta(description="none, minimal, low, medium, high, xhigh or max.")] | None
    ) = None
    enable_thinking: bool | None = None
    thinking: (
        Annotated[Any, Meta(description="A boolean, or of type enabled or disabled.")] | None
    ) = None
    reasoning: (
        Annotated[Any, Meta(description="An object with effort, or with enabled.")] | None
    ) = None


class CompletionRequest(CommonRequest, kw_only=True):
    """Body of ``POST /v1/completions``.

    With ``echo``, ``logprobs`` holds for the prompt's tokens too.

    It has no tools and no reasoning: only the values that switch them off are taken.
    """

    tools: Any = None
    tool_choice: Any = None
    reasoning_effort: Any = None
    enable_thinking: Any = None
    thinking: Any = None
    reasoning: Any = None

    prompt: Annotated[
        str | list[str | int | list[int]],
        Meta(
            description="A string, token ids, or a list of such prompts, each of which is answered."
        ),
    ]
    max_tokens: (
        Annotated[
            int,
            Meta(ge=0, le=MAX_INT32, description="0: nothing is written; the prompt is told."),
        ]
        | None
    ) = None
    echo: Annotated[bool, Meta(description="The text begins with the prompt.")] | None = None
    prompt_logprobs: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=20,
                description="How many of the likeliest tokens are told in the place of each of the prompt's.",
            ),
        ]
        | None
    ) = None
    logprobs: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=5,
                description="How many of the likeliest tokens are told with each, beside itself.",
            ),
        ]
        | None
    ) = None
