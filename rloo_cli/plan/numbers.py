"""Bytes of a number of each dtype."""

FLOAT32, BFLOAT16 = 4, 2
