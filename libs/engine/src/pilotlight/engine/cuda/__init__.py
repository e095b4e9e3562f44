"""Compute on CUDA.

Imported only where an arena is on a CUDA device: it needs triton, which torch's CUDA builds bring
along.
"""
