"""Text and labels → batches of token identifiers. No torch here."""
