"""What everything else stands on: errors, units, files, processes. Imports nothing of flopwise."""
