"""Channels between the stages of an instance: ordered frames, bounded, with deadlines.

::

    channel.py   frames, the protocol, and what all channels share: credit, deadlines, waiting
    memory.py    between two engines of one process
    stream.py    over a connected stream socket: the frames' bytes, what both of these share
    unix.py      between processes of one host, over a Unix socket
    tcp.py       between hosts, over TCP: only with a node that knows the cluster's key
    door.py      where a host listens for such channels

    device_path.py   how payloads go from device to device of one host, beside a channel over TCP
    ring.py          which bytes of device memory are taken by them
    mailbox.py       where the descriptor of that memory comes to
"""
