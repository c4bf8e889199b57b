"""Small records of what each step of a run computed, and what is different between two of them."""
