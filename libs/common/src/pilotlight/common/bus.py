"""The bus: request/reply with deadlines, notifications, events and last-value buckets on NATS.

Everything that crosses it carries W3C trace context and the time that is left in its headers. Subjects carry the major version
(``v1.…``). ``Bus`` is what services see; ``NatsBus`` (``nats_bus.py``) is the real one, tests wrap it to drop, delay and repeat
messages.
"""
