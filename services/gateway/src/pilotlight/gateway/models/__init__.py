"""Registered models: the table, how one is registered, and the view that requests are served
from.
"""
