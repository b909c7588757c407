"""Looking at what a run has written and at what a reward function does: reading and computing; `cli/` prints."""
