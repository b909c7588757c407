"""YAML in, a frozen and validated `Recipe` out. Imports no torch."""
