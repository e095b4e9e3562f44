"""Links between nodes: how parameters go from one host pool to another."""
