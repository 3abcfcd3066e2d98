"""From a plan to its program: buffers, values and tasks in order."""
