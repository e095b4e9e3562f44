"""Chat templates with a tools part, for tests: short ones, written after those that public models
come with.
"""

from typing import Any

from tokenizers import AddedToken, Tokenizer

from pilotlight.text.bundle import TextBundle
from pilotlight.text.testing import byte_level_json

HERMES_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\nYou may call functions.\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools>\\nReturn a json object within <tool_call></tool_call> tags:\\n<tool_call>\\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA_TEMPLATE = """\
{{- bos_token }}
{%- if tools is not none %}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.\\n\\n' }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) + '\\n\\n' }}
    {%- endfor %}
    {{- '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + ({'output': message.content} | tojson) + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL_TEMPLATE = """\
{{- bos_token }}
{%- set user_messages = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and message == user_messages[-1] %}
            {{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
            {%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (']' + eos_token if loop.last else ', ') }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id | length != 9 %}
            {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}
"""
TEMPLATES = {"hermes": HERMES_TEMPLATE, "llama": LLAMA_TEMPLATE, "mistral": MISTRAL_TEMPLATE}
_MARKERS = {
    "hermes": ["<tool_call>", "</tool_call>"],
    "mistral": ["[TOOL_CALLS]"],
    "llama": ["<|python_tag|>"],
    "none": [],
}
_NO_TOOLS = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


def bundle_of(dialect: str) -> TextBundle:
    """The text of a model of this dialect; of dialect ``none``, of one that knows no tools."""
    made = Tokenizer.from_str(byte_level_json())
    made.add_tokens([AddedToken(token, special=True) for token in _MARKERS[dialect]])  # pyright: ignore[reportUnknownMemberType] - tokenizers has no types for it
    return TextBundle(
        tokenizer_json=made.to_str(),
        chat_template=TEMPLATES.get(dialect, _NO_TOOLS),
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
    )


def written_calls(dialect: str, calls: list[tuple[str, str]], content: str = "") -> str:
    """An answer as a model of this dialect writes it: content, then calls, each with its name and
    the text of its arguments.
    """
    objects = [_written(dialect, name, arguments) for name, arguments in calls]
    match dialect:
        case "hermes":
            return content + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in objects)
        case "mistral":
            return f"{content}[TOOL_CALLS] [{', '.join(objects)}]"
        case _:
            return "; ".join(objects)


def _written(dialect: str, name: str, arguments: str) -> str:
    key = "parameters" if dialect == "llama" else "arguments"
    return f'{{"name": "{name}", "{key}": {arguments}}}'


WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
"""Arguments of a function that tests call."""
