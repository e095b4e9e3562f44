"""The pilotlight command; the embedded system and its supervisor."""
