"""A channel between processes of one host, over a connected Unix socket: whoever has the socket is trusted."""

from pilotlight.engine.channel.stream import StreamChannel


class UnixChannel(StreamChannel):
    """One end, over a socket that it owns from now on."""
