"""A node with no loader yet."""

from pathlib import Path

import pytest

from pilotlight.common.bus import Bus
from pilotlight.common.messages.phases import PHASES_SUBJECT, PhaseReport
from pilotlight.common.messages.reports import LOADER_REPORTS, LoaderReport
from pilotlight.common.testing import MakeContext
from pilotlight.loader.testing import Cluster, Heard


@pytest.fixture
async def cluster(tmp_path: Path, bus: Bus, make_context: MakeContext):
    heard = Heard()
    await bus.subscribe(LOADER_REPORTS, LoaderReport, heard.on_report)
    await bus.serve(PHASES_SUBJECT, PhaseReport, heard.on_phases)
    (tmp_path / "models").mkdir()
    built = Cluster(tmp_path, bus, make_context, heard)
    yield built
    for running in built.loaders:
        await running.stop()
