"""Engines as the worker sees them: one protocol (``client``), and what speaks it: a child process,
or a simulation.
"""
