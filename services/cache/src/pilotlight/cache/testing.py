"""For tests of the cache."""

from pilotlight.cache.books import Books
from pilotlight.common.messages.reports import LoaderReport, WorkerReport
from pilotlight.policy.types import Epoch, NodeFacts, WorkerFacts


def hear(books: Books, facts: WorkerFacts | NodeFacts, now_s: float) -> None:
    """Have books take a report, as they do from the bus."""
    roster = books.roster
    if isinstance(facts, WorkerFacts):
        news = roster.hear_worker(WorkerReport(facts=facts, incarnation="a", epoch_seen=Epoch(0)), now_s)
    else:
        news = roster.hear_loader(LoaderReport(facts=facts, incarnation="a", epoch_seen=Epoch(0)), now_s)
    books.follow(news, now_s)
