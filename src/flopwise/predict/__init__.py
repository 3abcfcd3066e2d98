"""Description → prediction. Pure: no files, no clock, no formatting, no torch."""
