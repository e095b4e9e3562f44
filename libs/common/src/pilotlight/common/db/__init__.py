"""The database: one schema and role for each owner, one unit of work, one outbox."""
