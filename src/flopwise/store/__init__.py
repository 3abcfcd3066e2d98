"""What is kept: runs, sweeps and their cells, rows of results, statistics over them."""
