"""Other tools' files to profiles."""
