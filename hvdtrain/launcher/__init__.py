"""Check, start and supervise the workers: standard library only, as torch may be missing."""
