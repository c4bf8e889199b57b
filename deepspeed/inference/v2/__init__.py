"""FastGen: the ragged engine, its configuration, and the sources of its weights."""
