"""Weights on their way in and out: first values, Hugging Face folders, checkpoints."""
