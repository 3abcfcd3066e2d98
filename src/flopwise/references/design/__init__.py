"""A machine that is not built yet, and the search for the fastest one."""
