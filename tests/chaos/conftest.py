"""Fixtures of the chaos tests, and the line that says what they add up to."""

from collections.abc import Iterator

import pytest
from chaos.system import ChaosSystem, Keeper
from chaos.tally import TALLY
from chaos.transfer_tally import TRANSFERS


@pytest.fixture(scope="session")
def keeper() -> Iterator[Keeper]:
    keeper = Keeper()
    yield keeper
    keeper.close()


@pytest.fixture
def system(keeper: Keeper, request: pytest.FixtureRequest) -> Iterator[ChaosSystem]:
    """The system that cells share; a cell that fails leaves none for the next."""
    found = keeper.system()
    failed_before = request.session.testsfailed
    found.spoiled = True
    yield found
    found.spoiled = request.session.testsfailed > failed_before


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Counts come with the report of a test, so that they come from other processes too."""
    if report.when == "call":
        for counts in (value for name, value in report.user_properties if name == "chaos"):
            assert isinstance(counts, dict)
            TALLY.schedules += counts["schedules"]
            TALLY.requests += counts["requests"]
            TALLY.lost += counts["lost"]
            TALLY.wrong_tokens += counts["wrong_tokens"]
            TALLY.tried_again += counts["tried_again"]
            TALLY.resumed += counts["resumed"]
            TALLY.resends += counts["resends"]
        for counts in (value for name, value in report.user_properties if name == "groups"):
            assert isinstance(counts, dict)
            TALLY.groups += counts["schedules"]
            TALLY.group_requests += counts["requests"]
            TALLY.group_moved += counts["moved"]
        for counts in (value for name, value in report.user_properties if name == "transfers"):
            assert isinstance(counts, dict)
            TRANSFERS.take(counts)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if TALLY.cells or TALLY.schedules or TALLY.groups:
        terminalreporter.section("chaos")
        for row in TALLY.table() if TALLY.costs else ():
            terminalreporter.line(row)
        terminalreporter.line(TALLY.line())
    if TRANSFERS.schedules:
        terminalreporter.section("transfers")
        for row in TRANSFERS.lines():
            terminalreporter.line(row)
