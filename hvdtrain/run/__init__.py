"""One training run on this rank: assembly, resume, ledger and files, console, stop."""
