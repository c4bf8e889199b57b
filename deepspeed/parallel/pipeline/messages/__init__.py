"""Messages between stages: channels and what travels in them."""
