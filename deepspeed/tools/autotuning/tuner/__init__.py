"""Orders in which a space of experiments is explored."""
