"""FastGen: the ragged engine, its configuration, and where its weights come from."""
