"""What makes captured graphs valid in another process (MEDUSA, sections 4 and 5): which words are
addresses, which buffers are saved, what cannot be restored, and in which order graphs come back.
"""
