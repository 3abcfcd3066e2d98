"""The museum: published models, rules and tables that flopwise is held against. Imported by the command line alone."""
