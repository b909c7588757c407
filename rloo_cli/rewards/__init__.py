"""Completions in, rewards out: built-in rewards are public names of this package."""
