"""Bodies of ``/v1``: their types, how they are decoded, and how much they may queue."""
