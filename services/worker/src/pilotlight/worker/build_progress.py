"""How far a build is, as its worker tells it."""

from pilotlight.common.waiting import Wake


class Progress:
    """How far a build is, and until when it is its worker's."""

    def __init__(self, leased_until_s: float) -> None:
        """``leased_until_s``: on the worker's clock."""
        self.step, self.share = "", 0.0
        self.leased_until_s = leased_until_s
        """On the worker's clock, as far as it has heard."""
        self.changed = Wake()

    async def tell(self, step: str, share: float) -> None:
        """Say what comes next, and what share of the build is done."""
        self.step, self.share = step, share
        self.changed.set()
