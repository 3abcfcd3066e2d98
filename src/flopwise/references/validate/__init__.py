"""Predictions against published tables: protocols, fits, held-out errors."""
