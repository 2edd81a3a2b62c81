"""Long runs, started by hand: `python -m tests.campaigns.NAME --help`."""
