"""What crosses a process boundary: one module per edge, one codec.

Subjects and frames carry a major version. Within it, changes are additive: a new field has a
default, a field is never renamed, removed or given another meaning. ``tests/contract/golden`` holds
old bytes that must decode for ever.
"""
