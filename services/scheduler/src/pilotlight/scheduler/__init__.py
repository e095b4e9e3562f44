"""Demand to instances: cold-start schemes, placement, scaling."""
