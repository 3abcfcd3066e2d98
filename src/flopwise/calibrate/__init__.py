"""Times a device and fits its efficiencies."""
