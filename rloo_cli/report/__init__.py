"""`rloo report`: a run as one HTML page: curves, what looks unhealthy, rollouts, recipe and environment."""
