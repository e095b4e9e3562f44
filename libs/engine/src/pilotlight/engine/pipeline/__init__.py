"""Stages of one instance that run as a pipeline, joined by channels in a ring.

::

    stage 0 (leads) ── hidden states ──> stage 1 ── hidden states ──> ... ──> last stage
       ^                                                                          │
       └──────────────────────────── sampled tokens ──────────────────────────────┘

Stage 0 takes the requests, plans every micro-batch, and owns the block table: a request's blocks
have the same numbers in all stages. Frames keep their order on the whole way round, so what stage 0
decided first happens first everywhere.
"""
