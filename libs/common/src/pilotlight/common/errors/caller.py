"""The request is wrong: sending it again changes nothing."""

from pilotlight.common.errors.base import CallerError


class BadRequest(CallerError):
    """The request is malformed."""


class ContextTooLong(BadRequest):
    """The prompt is longer than the model's context."""

    code = "context_length_exceeded"
    action = "Shorten the prompt, or ask for fewer tokens."

    @classmethod
    def by_prompt(
        cls, limit_tokens: int, prompt_tokens: int, *, chat: bool, more: bool = False
    ) -> "ContextTooLong":
        """The prompt alone leaves no room for an answer.

        In OpenAI's words: there are clients that look for them.

        Args:
            limit_tokens: the model's context.
            prompt_tokens: what the prompt has; with ``more`` it has at least this number.
            chat: it is a conversation's.
            more: the prompt was not counted to its end.
        """
        param = "messages" if chat else "prompt"
        resulted = f"{'at least ' if more else ''}{prompt_tokens} tokens"
        return cls(
            f"This model's maximum context length is {limit_tokens} tokens. However, your {param} resulted in {resulted}, which leaves "
            "no room for an answer",
            param=param,
        )


class MessageUndecodable(BadRequest):
    """A message cannot be decoded."""

    code = "message_undecodable"
    action = "Check that both ends run releases that speak the same major version."


class Unauthorized(CallerError):
    """A valid API key is needed."""

    code = "invalid_api_key"
    status = 401
    action = "Send `Authorization: Bearer KEY`; embedded mode writes keys to api.key and admin.key."


class Forbidden(CallerError):
    """This key may not do that."""

    code = "forbidden"
    status = 403
    action = "Use an admin key for /admin/v1, an inference key for /v1, with the role or routes for it: see `pilotlight key list`."


class NotFound(CallerError):
    """There is no such thing."""

    code = "not_found"
    status = 404
    action = "Check the name: the message says what was looked for."


class ModelNotFound(NotFound):
    """There is no such model."""

    code = "model_not_found"
    action = "See `pilotlight model list`, or register it with `pilotlight model add`."


class NodeNotFound(NotFound):
    """There is no such node."""

    code = "node_not_found"
    action = "See `pilotlight node list`; a node is known while its loader reports, or while it is to be drained."


class TraceNotFound(NotFound):
    """Nothing is kept of this trace."""

    code = "trace_not_found"
    action = "Check the id: it is the x-trace-id header of an answer, or trace_id in a log. Spans are kept for PILOTLIGHT_SPANS_KEEP_DAYS."


class RouteNotFound(NotFound):
    """There is no such route."""

    code = "route_not_found"
    action = "The API is described at /v1/openapi.json and /admin/v1/docs."


class MethodNotAllowed(CallerError):
    """The route does not take this method."""

    code = "method_not_allowed"
    status = 405
    action = "Use a method that the Allow header names."


class AlreadyExists(CallerError):
    """The name is taken."""

    code = "already_exists"
    status = 409
    action = "Choose another name, or delete the old one first."


class Conflict(CallerError):
    """The thing changed, or its state does not allow this."""

    code = "conflict"
    status = 409
    action = "Read it again and decide anew."


class ModelCold(Conflict):
    """The model is cold, and the request refuses a cold start."""

    code = "model_cold"
    action = (
        "Ask again once the model is ready (GET /v1/models), or without X-Pilotlight-Cold-Start."
    )


class UnprocessableInput(CallerError):
    """The request is well-formed, but a value is not acceptable."""

    code = "unprocessable"
    status = 422


class BadCheckpoint(UnprocessableInput):
    """The checkpoint is incomplete or damaged."""

    code = "bad_checkpoint"
    action = "Check the source, or download or export the checkpoint again; the message says what is missing or damaged."


class UnsupportedModel(UnprocessableInput):
    """This kind of model cannot be served."""

    code = "unsupported_model"
    action = "The message names what is missing; docs/concepts.md lists what is supported."


class UriNotAllowed(UnprocessableInput):
    """The model's URI lies outside the allowed roots."""

    code = "uri_not_allowed"
    action = "Move the model below a root, or add its root to PILOTLIGHT_MODEL_ROOTS."


class TextFailed(UnprocessableInput):
    """The model's chat template or tokenizer fails on this prompt."""

    code = "text_failed"
    action = "Change the prompt; if others fail, too, the model's chat template or tokenizer has to be mended, and registered anew."


class TooLarge(CallerError):
    """The request is too large."""

    code = "too_large"
    status = 413
    action = "Send less; the message names the limit."


class MessageTooLarge(TooLarge):
    """A message is beyond what the bus takes."""

    code = "message_too_large"


class HeadTooLarge(TooLarge):
    """The request line and the headers are too long."""

    code = "headers_too_large"
    status = 431
    action = "Send shorter headers or fewer of them; the message names the limit."


class BodyTimeout(CallerError):
    """The body did not arrive in time."""

    code = "body_timeout"
    status = 408
    action = "Send the whole body without long pauses; the message names the limit."


class QuotaUsedUp(CallerError):
    """The month's budget of the key or of its project is used up."""

    code = "insufficient_quota"
    status = 429
    action = "Wait for the next month, or raise the budget: `pilotlight key limit`, `pilotlight project limit`."
    openai_type = "insufficient_quota"


class UnsupportedEncoding(CallerError):
    """The body is encoded in a way that is not taken."""

    code = "unsupported_encoding"
    status = 415
    action = "Send the body as it is: no compression, no Content-Encoding."
