"""The one place for compatibility: documented paths and names that are not simply where our code is."""
