"""Host pool, its socket protocol, verified fetch in layer order."""
