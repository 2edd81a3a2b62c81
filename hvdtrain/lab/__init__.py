"""Commands that measure and verify: verify, verify-resume, compare, bench, plan and report."""
