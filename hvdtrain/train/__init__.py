"""Training: the loop, one step of it, and the state between two steps."""
