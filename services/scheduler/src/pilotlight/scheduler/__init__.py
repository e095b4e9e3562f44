"""Demand to instances: snapshot, policy, conditional apply, commands; and back from reports to
states.
"""
