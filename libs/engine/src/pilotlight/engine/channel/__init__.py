"""Channels between the stages of an instance: ordered frames, bounded, with deadlines.

::

    channel.py   frames, the protocol, and what all channels share: credit, deadlines, waiting
    memory.py    between two engines of one process
    unix.py      between processes, over a Unix socket
"""
