"""Node agent: host pool, fetch, worker supervision."""
