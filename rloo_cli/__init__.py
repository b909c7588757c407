"""Train language models with RLOO (REINFORCE Leave-One-Out) from YAML recipes."""

__version__ = "0.1.0"
