"""The executor that plays a program on one device, within its caps."""
