"""A program played against a hardware description."""
