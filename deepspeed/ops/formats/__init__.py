"""Number formats of few bits: encoding, decoding, packing."""
