"""The training loop, its step, evaluation, and the state between two steps."""
