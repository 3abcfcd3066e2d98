"""The Python door: what `import flopwise as fw` offers."""
