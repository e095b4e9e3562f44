"""What the kill matrix is made of: processes and faults, situations, clients, checks, and the tally
at the end.
"""
