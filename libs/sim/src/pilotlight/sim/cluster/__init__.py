"""A cluster in simulated time, under the scheduler's own control (``policy.control.tick``)."""
