"""Learning algorithms for agents that act over several turns."""
