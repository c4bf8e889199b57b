"""Planning memory before it is allocated: bytes per rank and place, by kind and phase (docs/memory.md)."""
