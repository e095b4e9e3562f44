"""Where exchanges note what they used."""

from typing import Protocol

from pilotlight.gateway.records.usage_journal import Meter


class UsageSink(Protocol):
    """Where requests are noted: while they run, and when they have ended (``UsageRecorder``)."""

    def meter(
        self, *, model: str, key_id: str, request_id: str, prompt_tokens: int
    ) -> Meter | None:
        """What outlives this process of a stream that has its first token; None: nothing does.

        Args:
            model: its name.
            key_id: of the API key that pays.
            request_id: the client's request.
            prompt_tokens: counted once, also for several choices.
        """
        ...

    def record(
        self,
        *,
        model: str,
        key_id: str,
        request_id: str,
        prompt_tokens: int,
        output_tokens: int,
        status: str,
        device_s: float = 0.0,
        meter: Meter | None = None,
    ) -> None:
        """Note one that has ended; never waits.

        Args:
            model: its name.
            key_id: of the API key that pays.
            request_id: the client's request.
            prompt_tokens: counted once, also for several choices.
            output_tokens: of all choices.
            status: ``ok``, ``cancelled`` or an error's code.
            device_s: device-seconds that it had, up to its last token.
            meter: the one that it had while it ran; None: nothing of it is noted yet.
        """
        ...
