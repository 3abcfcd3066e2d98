"""A folder for the front of PYTHONPATH: nothing but what Python runs at the start of a program."""
