"""Seconds and bytes of a step over several devices."""
