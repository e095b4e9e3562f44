"""Files of clients, and batches of requests that run when there is time."""
