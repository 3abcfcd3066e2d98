"""Names and files to descriptions: the catalogue that ships with flopwise, a file of your own, Hugging Face folders."""
