"""From activities to a summary, its checks, and what limits a run."""
