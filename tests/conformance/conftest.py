"""One server of each kind for all tests of what real servers say."""

from collections.abc import Iterator

import pytest
from ceph_server import CephServer, running_ceph


@pytest.fixture(scope="session")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CephServer]:
    with running_ceph(tmp_path_factory.mktemp("ceph")) as server:
        yield server
