"""What every service shares: bus, database, object store, settings, errors, telemetry."""
