"""Engines as the worker sees them: one protocol (``client``), and who speaks it: a child process, or a simulation."""
