"""Tool calls: how models write them, reading them while they come, and grammars that hold a model
to them.
"""
