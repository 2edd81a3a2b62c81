"""A training run on this rank: preparation, resume, a script's own loop, stop."""
