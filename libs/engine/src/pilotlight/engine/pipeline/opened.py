"""The requests that the other stages of a pipeline know, as the stage that leads has told them."""

from pilotlight.engine.core.request import Request
from pilotlight.engine.pipeline.frames import OpenedRequest
from pilotlight.engine.pipeline.planning import runs
from pilotlight.policy.request import RequestKey


class OpenRequests:
    """By key, and by which of their runs: one that left and came back is another one."""

    def __init__(self) -> None:
        self._open: dict[RequestKey, tuple[Request, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def introduce(self, request: Request) -> tuple[OpenedRequest, ...]:
        """What is told of a request before its next batch: nothing of one that is known."""
        if request.key in self._open:
            return ()
        self._open[request.key] = request, request.takes
        prompt_ids, output_ids = (
            request.token_ids[: request.prompt_tokens],
            request.token_ids[request.prompt_tokens :],
        )
        opened = OpenedRequest(request.key, tuple(prompt_ids), tuple(output_ids), request.sampling)
        return (opened,)

    def close_gone(self) -> tuple[RequestKey, ...]:
        """Forgets the requests that own no blocks any more, or own others since."""
        gone = tuple(
            key for key, (request, takes) in self._open.items() if not runs(request, takes)
        )
        for key in gone:
            del self._open[key]
        return gone

    def clear(self) -> None:
        """Other stages are to know them: each is introduced again."""
        self._open.clear()
