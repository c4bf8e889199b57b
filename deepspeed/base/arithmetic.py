"""Integer arithmetic."""

from __future__ import annotations


def prime_factors(number: int) -> list[int]:
    """Return the prime factors of `number` with multiplicity, smallest first: 12 gives [2, 2, 3]."""
    if number <= 0:
        raise ValueError(f"{number} has no prime factors: expected a positive integer")
    factors: list[int] = []
    candidate = 2
    while candidate * candidate <= number:
        while number % candidate == 0:
            factors.append(candidate)
            number //= candidate
        candidate += 1
    return factors + [number] if number > 1 else factors
