"""The executor that trains on several devices."""
