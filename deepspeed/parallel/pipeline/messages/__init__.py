"""Messages between stages: channels and their encoding."""
