"""A training run on this rank: preparation, resume, records and files, console output, stop."""
