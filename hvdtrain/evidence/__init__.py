"""What proves that a result is right: certificates, replay and comparison of recorded runs."""
