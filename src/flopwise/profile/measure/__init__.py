"""Counters and traces of a running program, and what this machine is."""
