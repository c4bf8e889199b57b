"""Transports: how the bytes of a collective travel, chosen per group."""
