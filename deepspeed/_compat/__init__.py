"""Compatibility has one address: documented paths and names that are not simply where our code lives."""
