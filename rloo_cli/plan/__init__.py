"""Everything that can be known before training starts."""
