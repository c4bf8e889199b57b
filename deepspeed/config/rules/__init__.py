"""Rules that tie several sections of a config together, by topic; `all` lists and runs them."""
