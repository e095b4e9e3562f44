"""Simulations of the policies: the very functions that the services call."""
