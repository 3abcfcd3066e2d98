"""Many set-ups: a grid of cells, predicted, run for real, and launched here or on a cluster."""
