"""The way of a request from its arrival to its last token: queue, route, relay."""
