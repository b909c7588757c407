"""Rewards in, advantages and loss out: pure tensor maths."""
