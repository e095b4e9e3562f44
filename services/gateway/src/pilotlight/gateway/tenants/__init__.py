"""Organizations, their projects, and the keys of each."""
