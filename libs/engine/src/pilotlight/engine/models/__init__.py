"""What each architecture computes."""
