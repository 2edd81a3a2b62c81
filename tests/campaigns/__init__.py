"""Long runs for a person to start: `python -m tests.campaigns.NAME --help`."""
