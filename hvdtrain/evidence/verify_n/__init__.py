"""`hvdtrain verify-n`: verification that a configuration learns the same on every N workers."""
