"""What is written down and shown: audit log, usage, spans, metrics, and how long they are kept."""
