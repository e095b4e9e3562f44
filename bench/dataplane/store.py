"""The remote store of a benchmark: Ceph's S3 server, in memory, with one model in one bucket.

From Debian: ``apt-get install --no-install-recommends ceph-mon ceph-osd radosgw ceph-common``.
"""

import asyncio
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import obstore
from bare_loader import settings_for

from pilotlight.common.bucket import ensure_bucket
from pilotlight.common.s3 import s3_store

BUCKET = "bench"
MODEL_URI = f"s3://{BUCKET}/model"
SUPPORT = Path(__file__).resolve().parent.parent.parent / "tests" / "support"


@contextmanager
def ceph(folder: Path, host: str, store_bytes: int) -> Generator[str]:
    """Ceph's server at an address of this namespace; yields its URL.

    The environment gets its credentials.

    Raises:
        SystemExit: it is not installed.
    """
    sys.path.insert(0, str(SUPPORT))
    import ceph_server

    if missing := ceph_server.missing_programs():
        raise SystemExit(
            f"not installed: {', '.join(missing)}. apt-get install --no-install-recommends {' '.join(ceph_server.PACKAGES)}"
        )
    os.environ.update(
        AWS_ACCESS_KEY_ID=ceph_server.ACCESS_KEY, AWS_SECRET_ACCESS_KEY=ceph_server.SECRET_KEY
    )
    with ceph_server.running_ceph(folder, store_bytes=store_bytes, host=host) as server:
        yield server.url


def upload(folder: Path, endpoint: str) -> None:
    """Put a model's files into the bucket."""
    settings = settings_for(MODEL_URI, endpoint)
    asyncio.run(ensure_bucket(f"s3://{BUCKET}", settings))
    bucket = s3_store(settings, BUCKET, read_timeout_s=120)
    for file in sorted(path for path in folder.iterdir() if path.is_file()):
        obstore.put(bucket, f"model/{file.name}", file)
