"""Chat templates: Jinja programs that come with a model and write its prompts.

Rendered as transformers renders them: same sandbox, same extensions, same ``tojson``,
``raise_exception`` and ``strftime_now`` (in UTC here). A template is foreign code that runs on
every request, so these are bounded:

* its length, and the length of what it writes;
* its steps (a turn of a loop, a call of a macro) and its time, looked at with each step;
* texts and numbers that it builds with ``+``, ``*`` and ``~``, and every value that it writes.
  ``**`` is refused.

Not bounded here is the work of a single filter or method call (``'x'|center(10**9)`` written out):
it lasts as long and takes as much memory as it does. So services compile and render templates in a
process with limits of its own, which may be lost (the gateway's text helpers). Nothing is computed
while compiling: Jinja would fold such a call, when no meter runs.
"""

import json
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from pilotlight.common.clock import Clock
from pilotlight.common.errors import BadCheckpoint, BadRequest, TooLarge

MAX_TEMPLATE_CHARS = 256 * 1024
MAX_RENDERED_CHARS = 16 * 1024 * 1024
"""Twice what a request may hold: a template that repeats a conversation has no use."""
MAX_STEPS = 250_000
MAX_RENDER_S = 5.0
MAX_NUMBER_BITS = 256
RESERVED = frozenset(
    {
        *(
            "messages",
            "tools",
            "documents",
            "add_generation_prompt",
            "continue_final_message",
            "chat_template",
        ),
        *(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")),
        *("raise_exception", "strftime_now", "namespace", "dict", "range", "cycler", "joiner"),
    }
)
"""Names that a template's variables cannot have: they mean something already."""

_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
"""What stands in a rendered prompt for the end of the message that is continued; transformers'
word, which some templates know."""

_COMPILE_FAULTS = (jinja2.TemplateError, SyntaxError, ValueError, RuntimeError, MemoryError)
_RENDER_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    NameError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a program in Jinja can raise. RuntimeError has RecursionError below it, ValueError has
UnicodeError."""


class ChatTemplate:
    """A model's chat template, compiled once. May be rendered from several threads at a time."""

    def __init__(self, source: str | None, special_tokens: Mapping[str, str], clock: Clock) -> None:
        """Compile.

        Args:
            source: the template; None for a model without one.
            special_tokens: by role, as in ``TextBundle``; the template sees them as variables.
            clock: for the time bound, and for templates that write the date.

        Raises:
            BadCheckpoint: the template is too long or no valid Jinja.
        """
        self._special_tokens = dict(special_tokens)
        self._clock = clock
        self._template = None if source is None else _compile(source, clock)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Write the prompt of a conversation.

        Args:
            messages: as in the API, with plain strings as content.
            tools: descriptions of functions; the template sees None when there are none.
            add_generation_prompt: end with the beginning of the assistant's answer.
            continue_final_message: end with the last message's content, as it is so far: the answer
                goes on with it. Not together with ``add_generation_prompt``.
            variables: more of what the template may know (``enable_thinking``); it cannot replace
                the above.

        Raises:
            BadRequest: there is no template, it refuses these messages, or it fails or works too
                long on them.
            TooLarge: the prompt is beyond ``MAX_RENDERED_CHARS``, or writing it takes more memory
                than there is.
        """
        if self._template is None:
            raise BadRequest(
                "this model has no chat template: send its prompt to /v1/completions",
                param="messages",
            )
        visible = {
            **(variables or {}),
            **self._special_tokens,
            "messages": [*messages[:-1], _marked(messages[-1])]
            if continue_final_message
            else messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        running = _meter.set(_Meter(self._clock))
        try:
            prompt = "".join(self._template.generate(visible))
        except MemoryError as error:
            raise TooLarge(
                "the model's chat template takes too much memory on these messages",
                param="messages",
            ) from error
        except _RENDER_FAULTS as error:
            raise BadRequest(
                f"the model's chat template cannot write these messages: {error}", param="messages"
            ) from error
        finally:
            _meter.reset(running)
        return _unfinished(prompt, messages[-1]) if continue_final_message else prompt


def check_template(source: str) -> None:
    """Raise ``BadCheckpoint`` unless this is a chat template that can be compiled."""
    _compile(source, clock=None)


def _marked(message: Mapping[str, Any]) -> dict[str, Any]:
    return {**message, "content": message["content"] + _CONTINUED}


def _unfinished(prompt: str, last: Mapping[str, Any]) -> str:
    """A prompt up to the mark, as transformers cuts it: a template that trims contents has taken
    the mark's blank, too.
    """
    end = prompt.rfind(_CONTINUED.rstrip())
    if end < 0 or last["content"].strip() not in prompt:
        raise BadRequest(
            "continue_final_message: the model's chat template does not write the last message as it is, so it cannot be continued",
            param="continue_final_message",
        )
    return prompt[:end] if prompt.startswith(_CONTINUED, end) else prompt[:end].rstrip()


class _Meter:
    """What one rendering has used up."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_s = clock.monotonic_s() + MAX_RENDER_S
        self._steps = 0
        self._chars = 0

    def step(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS or self._clock.monotonic_s() > self._until_s:
            raise BadRequest(
                "the model's chat template works too long on these messages", param="messages"
            )

    def write(self, chars: int) -> None:
        self._chars += chars
        if self._chars > MAX_RENDERED_CHARS:
            raise TooLarge(
                f"the chat template writes more than {MAX_RENDERED_CHARS} characters",
                param="messages",
            )


_meter: ContextVar[_Meter] = ContextVar("pilotlight_template_meter")


class _Namespace(Namespace):
    """Jinja's ``namespace()`` without names that Python gives a meaning to."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        values: dict[str, Any] = dict(*args, **kwargs)
        super().__init__()
        for name, value in values.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace takes no name like {name!r}")
        super().__setitem__(name, value)


class _CodeGenerator(CodeGenerator):
    """Computes no output while compiling: the generator does so by itself, even without the
    optimizer. Calls of the environment's own methods, which no template can name, pass no sandbox.
    """

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        raise nodes.Impossible

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:  # noqa: N802 - Jinja's name
        if not isinstance(node.node, nodes.EnvironmentAttribute):
            super().visit_Call(node, frame, forward_caller=forward_caller)
            return
        self.visit(node.node, frame)
        self.write("(")
        for value in node.args:
            self.visit(value, frame)
            self.write(", ")
        self.write(")")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, metered. What ``_instrument`` adds to a template calls ``step``, ``literal`` and
    ``join``.
    """

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset({"+", "*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        texts = operator == "+" and type(left) is type(right) is str
        if texts and len(left) + len(right) <= MAX_RENDERED_CHARS:
            return left + right
        if operator == "**":
            raise SecurityError("chat templates may not use **")
        size = (
            _size(left) + _size(right)
            if operator == "+"
            else _size(left) * _times(right) + _size(right) * _times(left)
        )
        if size > MAX_RENDERED_CHARS or _bits(left) + _bits(right) > MAX_NUMBER_BITS:
            raise SecurityError(
                f"a value beyond {MAX_RENDERED_CHARS} items or {MAX_NUMBER_BITS} bits"
            )
        return super().call_binop(context, operator, left, right)

    def step(self) -> bool:
        """Count one step; true, so that it can stand in a condition."""
        _meter.get().step()
        return True

    def literal(self, text: str) -> str:
        """Text of the template itself, as a value: values are metered when they are written, and
        constants are not.
        """
        return text

    def join(self, *values: Any) -> str:
        """The operator ``~``."""
        texts = [str(value) for value in values]
        _meter.get().write(sum(map(len, texts)))
        return "".join(texts)


def _compile(source: str, clock: Clock | None) -> jinja2.Template:
    if len(source) > MAX_TEMPLATE_CHARS:
        raise BadCheckpoint(
            f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are taken"
        )
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols],
        finalize=_metered,
        optimized=False,
    )

    def strftime_now(layout: str) -> str:
        if clock is None:
            raise RuntimeError("a template that is only checked is not rendered")
        return clock.wall().strftime(layout)

    environment.filters["tojson"] = _tojson
    functions: dict[str, Any] = environment.globals
    functions.update(
        raise_exception=_raise_exception,
        strftime_now=strftime_now,
        namespace=_Namespace,
        dict=_dict,
    )
    del functions["lipsum"]
    try:
        tree = environment.parse(source)
        _instrument(tree, environment)
        return environment.from_string(tree)
    except _COMPILE_FAULTS as error:
        raise BadCheckpoint(f"the chat template is not valid: {error}") from error


def _instrument(tree: nodes.Template, environment: _Environment) -> None:
    """Put a step into every loop and macro, ``join`` in the place of ``~``, and ``literal`` around
    the template's own text.
    """
    for loop in list(tree.find_all(nodes.For)):
        if loop.test is not None:
            # Items that the condition drops never reach the body.
            loop.test = nodes.And(_call("step"), loop.test)
        loop.body.insert(0, nodes.ExprStmt(_call("step")))
    for macro in [*tree.find_all(nodes.Macro), *tree.find_all(nodes.CallBlock)]:
        macro.body.insert(0, nodes.ExprStmt(_call("step")))
    _replace_within(tree)
    for node in tree.find_all(nodes.Node):
        node.lineno = node.lineno or tree.lineno
    tree.set_environment(environment)


def _replace_within(node: nodes.Node) -> None:
    for name, value in node.iter_fields():
        if isinstance(value, list):
            setattr(node, name, [_replacement(item) for item in cast("list[Any]", value)])
        else:
            setattr(node, name, _replacement(value))


def _replacement(value: Any) -> Any:
    if not isinstance(value, nodes.Node):
        return value
    _replace_within(value)
    if isinstance(value, nodes.Concat):
        return _call("join", *value.nodes)
    if isinstance(value, nodes.TemplateData):
        return _call("literal", nodes.Const(value.data))
    return value


def _call(method: str, *args: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), list(args), [], None, None)


def _metered(value: Any) -> Any:
    """See every value before it is written, within macros and blocks too.

    While compiling, no meter runs.
    """
    meter = _meter.get(None)
    if meter is None:
        return value
    text: str = value if type(value) is str else str(value)
    meter.write(len(text))
    return text


def _size(value: Any) -> int:
    return len(cast("Sequence[Any]", value)) if isinstance(value, (str, bytes, list, tuple)) else 0


def _times(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which a prompt is not.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
    # The class itself would let ``dict.update(messages[0], ...)`` past the sandbox, which knows
    # instances alone.
    return dict(*args, **kwargs)
