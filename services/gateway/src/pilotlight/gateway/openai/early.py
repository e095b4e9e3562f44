"""What is refused before its prompt is prepared."""

import math
from functools import partial

from starlette.types import Scope

from pilotlight.common.errors import TooManyHeld
from pilotlight.gateway.edge.refusals import refusals_of
from pilotlight.gateway.models.catalog import CatalogEntry
from pilotlight.gateway.openai.asker import Asker
from pilotlight.gateway.openai.choice import ExchangeParts
from pilotlight.gateway.serving.starts import ColdStart
from pilotlight.policy.ids import ModelName


def check_room(
    parts: ExchangeParts, asker: Asker, entry: CatalogEntry, prompt_wait_s: float, scope: Scope
) -> None:
    """A request whose turn would never come, or too late for what its model promises, is refused,
    and counted as those are that are refused later; it has used nothing, so there is no record of
    its use. One that is above its key's limits anyway is told that, as if there were room. Lines of
    batches are promised nothing.

    Args:
        parts: what exchanges work with.
        asker: whose request it is.
        entry: its model.
        prompt_wait_s: how long its prompt would wait to be prepared.
        scope: of the request, whose answer has not begun.

    Raises:
        TooManyHeld: all places are taken where it would wait, or it would wait for too long.
        RateLimited, QuotaUsedUp: so it is, and its key or project may have nothing now.
    """
    if asker.cold_start is not ColdStart.ALLOW:
        # Such a request may have another reason to be refused, and does not wait.
        return
    due_s = entry.model.slo.ttft_ms / 1000 if asker.paced else math.inf
    try:
        parts.requests.check_room(entry.model, asker.key.tenant.share, prompt_wait_s, due_s)
    except TooManyHeld as error:
        if asker.paced:
            parts.limiter.check(asker.key.key_id, asker.key.tenant, scope)
        counted = partial(_counted, parts, entry.model.name, error.code)
        counted()
        if asker.paced and (refusals := refusals_of(scope)) is not None:
            # Another one: as it is raised, this one gets to know frames, and what they hold.
            told = TooManyHeld(error.message, retry_after_s=error.retry_after_s)
            refusals.note(scope, entry.model.name, told, counted)
        raise


def _counted(parts: ExchangeParts, model: ModelName, code: str) -> None:
    parts.requests.arrived(model)
    parts.measures.finished(model, code, 0, 0, None, held=False)
