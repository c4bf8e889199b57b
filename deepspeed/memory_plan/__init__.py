"""Memory planned before it is allocated: bytes per rank on device, host and disk, by kind and phase.

See docs/memory.md."""
