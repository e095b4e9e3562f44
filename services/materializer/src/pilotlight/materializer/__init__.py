"""Materialized state: signing, storing and finding artifacts."""
