"""Search for the quickest configuration."""
