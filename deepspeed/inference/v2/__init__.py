"""FastGen: so far its configuration."""
