"""Master weights and optimizer state: who owns which fragment, and access by parameter."""
