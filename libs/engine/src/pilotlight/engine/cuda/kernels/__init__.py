"""Triton kernels.

Each has a wrapper that takes tensors, checks nothing and allocates nothing but its result.
"""
