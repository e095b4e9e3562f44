"""The native torch engine: any layer range of a decoder-only model.

::

    core/        what runs next: requests, batches, KV blocks, admission, noise. No torch.
    device/      tensors: parameters, the KV cache, the runner of a layer range, the sampler.
    models/      what an architecture computes, one short file each.
    channel/     ordered frames between stages, in memory or over a Unix socket.
    pipeline/    stages of one model, joined by channels: the one that leads, and those that follow.
    resident.py  one stage, from its first part to its unloading.
    engine.py    the facade: what the worker's engine child calls.

Importing this package imports no torch; ``pilotlight.engine.engine`` does.
"""
