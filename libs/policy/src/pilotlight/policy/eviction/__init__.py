"""Which copies go when room is needed: one protocol, one module per policy."""
