"""Prompts, in an order that can be resumed."""
