"""The fastest way to spread a step over devices."""
