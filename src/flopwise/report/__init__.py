"""Records → people: published tables in, readable tables and files out."""
