"""Functions computed in tiles along the sequence: what lies between input and output exists for one tile at a time."""
