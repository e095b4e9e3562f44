"""Settings of the materializer."""

from pilotlight.common.db.retention import PruneSettings
from pilotlight.common.settings import DatabaseSettings, ServiceSettings


class MaterializerSettings(ServiceSettings, DatabaseSettings, PruneSettings):
    """What the materializer needs: bus, object store, its schema, and the secret
    ``cluster-key``.
    """
