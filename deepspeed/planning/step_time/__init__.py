"""How long a step takes: predicted for machines and networks that need not be there."""
