"""What flows through flopwise: frozen descriptions, units, errors, the catalogue."""
