"""The reference offload trainer's rule, and plans recorded from it."""
