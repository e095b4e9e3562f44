"""Messages: from the API's shape to what chat templates expect."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pilotlight.common.errors import BadRequest
from pilotlight.gateway.openai.reasoning import reasoning_variables
from pilotlight.gateway.openai.tools import ToolUse
from pilotlight.gateway.schema.requests import ChatMessage, ChatRequest, GivenCall, TextPart
from pilotlight.gateway.texts.frames import Conversation
from pilotlight.gateway.texts.model_text import ModelText
from pilotlight.text.template import RESERVED
from pilotlight.text.tools.probe import TemplateTools

MAX_VARIABLES_BYTES = 16 * 1024
"""What a request may tell a chat template beside messages and tools, as JSON."""


def conversation_of(request: ChatRequest, text: ModelText, use: ToolUse) -> Conversation:
    """A request's messages as the model's template expects them, and what else it is told.

    Raises:
        BadRequest: a message lacks something or has too much, the template would leave a call or a
            result out, or what is said of the prompt contradicts itself.
    """
    messages = request.messages
    reader = _Reader(text.tools)
    plain = [reader.read(message, index) for index, message in enumerate(messages)]
    variables = request.chat_template_kwargs or {}
    _check_variables(variables)
    variables = {**variables, **reasoning_variables(request, text.reasoning)}
    continued = _continues(request)
    return Conversation(
        messages=plain,
        tools=use.described,
        variables=variables,
        add_generation_prompt=request.add_generation_prompt is not False and not continued,
        continue_final_message=continued,
    )


def _continues(request: ChatRequest) -> bool:
    """Whether the answer goes on with the last message."""
    if not request.continue_final_message:
        return False
    param = "continue_final_message"
    if request.add_generation_prompt:
        raise BadRequest(
            f"{param} and add_generation_prompt contradict each other: set one of them to false",
            param=param,
        )
    last = request.messages[-1]
    if last.role != "assistant" or last.content is None or last.tool_calls:
        raise BadRequest(
            f"{param}: the last message must be a text of the assistant's, without calls of tools",
            param=param,
        )
    return True


def _check_variables(variables: Mapping[str, Any]) -> None:
    if not variables:
        return
    param = "chat_template_kwargs"
    for name in variables:
        if name in RESERVED or re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) is None:
            raise BadRequest(
                f"{param}: {name[:64]!r} is no variable that a request may set", param=param
            )
    try:
        chars = len(msgspec.json.encode(variables))
    except RecursionError as error:
        raise BadRequest(f"{param} is nested too deeply", param=param) from error
    if chars > MAX_VARIABLES_BYTES:
        raise BadRequest(
            f"{param} has {chars} bytes; at most {MAX_VARIABLES_BYTES} are taken", param=param
        )


@dataclass(slots=True)
class _Reader:
    template: TemplateTools
    called: dict[str, str] = field(default_factory=dict[str, str])
    """Names of functions by the ids of their calls, so far."""

    def read(self, message: ChatMessage, index: int) -> dict[str, Any]:
        where = f"messages[{index}]"
        if message.function_call:
            raise BadRequest(
                "function_call is not supported: use tool_calls", param=f"{where}.function_call"
            )
        plain: dict[str, Any] = {
            "role": "system" if message.role == "developer" else message.role,
            "content": _content(message, where),
        }
        if message.name is not None:
            plain["name"] = message.name
        if message.reasoning_content is not None and message.role == "assistant":
            plain["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            if message.role != "assistant":
                raise BadRequest("only the assistant calls tools", param=f"{where}.tool_calls")
            plain["tool_calls"] = self._calls(message.tool_calls, f"{where}.tool_calls")
        if message.role == "tool":
            plain |= self._result(message, where)
        return plain

    def _calls(self, calls: list[GivenCall], where: str) -> list[dict[str, Any]]:
        if not self.template.writes_calls:
            raise BadRequest(
                "this model's chat template does not write calls of tools: leave them out",
                param=where,
            )
        plain: list[dict[str, Any]] = []
        for index, call in enumerate(calls):
            arguments = self._arguments(
                call.function.arguments or "{}", f"{where}[{index}].function.arguments"
            )
            self.called[call.id] = call.function.name
            function = {"name": call.function.name, "arguments": arguments}
            plain.append({"id": self._id(call.id), "type": "function", "function": function})
        return plain

    def _arguments(self, text: str, where: str) -> dict[str, Any] | str:
        try:
            arguments = msgspec.json.decode(text, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadRequest(
                f"{where}: a call's arguments are the text of a JSON object: {error}", param=where
            ) from error
        return text if self.template.arguments_as_text else arguments

    def _result(self, message: ChatMessage, where: str) -> dict[str, Any]:
        if message.tool_call_id is None:
            raise BadRequest(
                "a tool's message says which call it answers", param=f"{where}.tool_call_id"
            )
        if message.tool_call_id not in self.called:
            raise BadRequest(
                f"no call before this message has the id {message.tool_call_id[:64]!r}",
                param=f"{where}.tool_call_id",
            )
        if not self.template.writes_results:
            raise BadRequest(
                "this model's chat template does not write what tools answer: leave it out",
                param=where,
            )
        # Some templates insist on the name, which the API does not ask for.
        name = message.name or self.called[message.tool_call_id]
        return {"tool_call_id": self._id(message.tool_call_id), "name": name}

    def _id(self, call_id: str) -> str:
        """A call's id as the template takes it, also of an id that another server made."""
        chars = self.template.dialect.max_id_chars if self.template.dialect is not None else None
        if chars is None or re.fullmatch(rf"[a-zA-Z0-9]{{{chars}}}", call_id):
            return call_id
        return hashlib.blake2b(call_id.encode()).hexdigest()[:chars]


def _content(message: ChatMessage, where: str) -> str:
    content: str | list[TextPart] | None = message.content
    if content is None:
        if message.role != "assistant":
            raise BadRequest("a message needs content", param=f"{where}.content")
        return ""
    return "\n".join(part.text for part in content) if isinstance(content, list) else content
