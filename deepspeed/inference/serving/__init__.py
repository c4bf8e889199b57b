"""Serving: many clients of one generator, as text, over HTTP."""
