"""So that a real one is not found in the place of the stand-in."""

raise ImportError("as the test wants it")
