"""What is refused before its prompt is prepared."""

from pilotlight.common.errors import TooManyHeld
from pilotlight.gateway.models.catalog import CatalogEntry
from pilotlight.gateway.openai.asker import Asker
from pilotlight.gateway.openai.choice import ExchangeParts
from pilotlight.gateway.serving.starts import ColdStart


def check_room(parts: ExchangeParts, asker: Asker, entry: CatalogEntry) -> None:
    """A request whose turn would never come is refused, and counted as those are that are refused
    later; it has used nothing, so there is no record of its use.

    Raises:
        TooManyHeld: all places are taken where it would wait.
    """
    if asker.cold_start is not ColdStart.ALLOW:
        # Such a request may have another reason to be refused, and does not wait.
        return
    try:
        parts.requests.check_room(entry.model.name, asker.key.tenant.share)
    except TooManyHeld as error:
        parts.measures.finished(entry.model.name, error.code, 0, 0, None, held=False)
        raise
