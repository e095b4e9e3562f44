"""What the gateway counts of requests, for Prometheus."""

from collections import defaultdict

from prometheus_client import CollectorRegistry, Gauge

from pilotlight.common.tallies import HistogramTally, Tally
from pilotlight.gateway.schema.attained import Attained
from pilotlight.gateway.serving.queue import PendingQueue
from pilotlight.gateway.serving.relay import Relay

_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)


class Measures:
    """Counters of finished requests, gauges of those under way."""

    def __init__(self, registry: CollectorRegistry, queue: PendingQueue, relay: Relay) -> None:
        self._requests = Tally(
            "pilotlight_requests", "Finished requests.", ["model", "status"], registry
        )
        self._prompt = Tally("pilotlight_prompt_tokens", "Tokens of prompts.", ["model"], registry)
        self._output = Tally("pilotlight_output_tokens", "Tokens of answers.", ["model"], registry)
        self._first_token_s = HistogramTally(
            "pilotlight_first_token_seconds",
            "From arrival to first token; held requests found no ready instance.",
            ["model", "held"],
            _SECONDS,
            registry,
        )
        self._first_tokens = Tally(
            "pilotlight_first_tokens",
            "First tokens, by whether they came within the TTFT target of their model's SLO.",
            ["model", "met"],
            registry,
        )
        self._attained = defaultdict[str, Attained](Attained)
        held = Gauge(
            "pilotlight_held_requests", "Requests that wait for an instance.", registry=registry
        )
        held.set_function(lambda: float(queue.held))
        running = Gauge(
            "pilotlight_running_requests", "Requests that run on a worker.", registry=registry
        )
        running.set_function(lambda: float(relay.running))

    def finished(
        self,
        model: str,
        status: str,
        prompt_tokens: int,
        output_tokens: int,
        first_token_s: float | None,
        *,
        held: bool,
    ) -> None:
        """Count one request.

        Args:
            model: its name.
            status: ``ok``, ``cancelled`` or an error's code.
            prompt_tokens: the prompt's length.
            output_tokens: tokens that were produced.
            first_token_s: seconds to the first one; None: there was none.
            held: whether the request waited for an instance.
        """
        self._requests.add(model, status)
        self._prompt.add(model, amount=prompt_tokens)
        self._output.add(model, amount=output_tokens)
        if first_token_s is not None:
            self._first_token_s.series(model, "true" if held else "false").observe(first_token_s)

    def first_token(self, model: str, *, met: bool) -> None:
        """Count a first token, which came in time or did not."""
        self._first_tokens.add(model, "true" if met else "false")
        counts = self._attained[model]
        counts.first_tokens += 1
        counts.first_tokens_met += met

    def answer(self, model: str, *, met: bool) -> None:
        """Count an answer, whose tokens came in time or did not."""
        counts = self._attained[model]
        counts.answers += 1
        counts.answers_met += met

    def attained(self) -> dict[str, Attained]:
        """Who kept the SLO since this was asked last, by model."""
        counted, self._attained = self._attained, defaultdict[str, Attained](Attained)
        return counted
