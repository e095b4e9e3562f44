"""Pure decision functions and the frozen dataclasses that every service speaks in."""
