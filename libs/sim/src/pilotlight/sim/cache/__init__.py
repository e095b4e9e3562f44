"""A cache of models under recorded or generated requests, with bounds on what any policy can do."""
