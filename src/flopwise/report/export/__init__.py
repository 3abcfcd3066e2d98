"""A plan as another trainer's configuration."""
