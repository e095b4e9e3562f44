"""Everything that touches tensors but knows no architecture."""
