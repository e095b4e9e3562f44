"""Sources beyond this host: buckets and hubs, behind ``pilotlight.checkpoint.reader.Source``."""
