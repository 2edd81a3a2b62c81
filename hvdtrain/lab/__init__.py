"""Commands that measure and verify.

verify, verify-resume, verify-n, compare, bench, plan and report.
"""
