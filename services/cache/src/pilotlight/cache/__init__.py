"""The parameter pool; room on devices and in host pools, and what is evicted for it."""
