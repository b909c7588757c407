"""Processes and machines."""
