"""Serving: one generator behind an HTTP server for many clients."""
