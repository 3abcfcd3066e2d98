"""Cells as jobs of Slurm and SkyPilot."""
