"""Models, data and tasks of one's own. Run them from the repository's root."""
