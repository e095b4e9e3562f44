"""A channel between processes of one host, over a connected Unix socket: a process that has the
socket is trusted.
"""

from pilotlight.engine.channel.stream import StreamChannel


class UnixChannel(StreamChannel):
    """One end, over a socket that it owns from now on."""
