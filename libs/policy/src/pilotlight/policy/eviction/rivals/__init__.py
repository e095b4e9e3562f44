"""What others use, behind the same protocol: to compare with, and to choose from."""
