"""The control loop: what is known goes in, one plan comes out. ``tick.tick`` is the whole of it."""
