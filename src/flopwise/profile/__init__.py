"""Measurements and traces → facts about a machine. Today: what this machine is."""
