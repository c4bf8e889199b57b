"""Single steps of a decoder, by their documented names."""
