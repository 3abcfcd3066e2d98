"""The fastest schedule for one device and two memory caps."""
