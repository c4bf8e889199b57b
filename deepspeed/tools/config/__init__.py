"""Tools for config files: check one without starting a run, correct it, read client config files."""
