"""Commands that measure and prove: verify, compare, bench, plan and report."""
