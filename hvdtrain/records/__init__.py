"""A run's folder and its only reader and writer: ledger, console, trace file, trackers."""
