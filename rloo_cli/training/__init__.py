"""The training loop and what it drives."""
