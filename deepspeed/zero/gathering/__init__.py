"""Stage 3: parameters that exist as slices and are gathered around their use."""
