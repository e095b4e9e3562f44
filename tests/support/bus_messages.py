"""Messages that only tests send."""

from pilotlight.common.messages.codec import Message


class Ask(Message, frozen=True, kw_only=True):
    text: str = ""


class Answer(Message, frozen=True, kw_only=True):
    text: str


class Number(Message, frozen=True, kw_only=True):
    number: int


async def echo(request: Ask) -> Answer:
    return Answer(text=request.text)
