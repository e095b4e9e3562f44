"""The HTTP edge: connections, bodies within limits, streams, and one shape for every error.

It knows no model and no fleet.
"""
