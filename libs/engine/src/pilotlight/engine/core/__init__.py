"""What runs next, decided without a tensor in sight."""
