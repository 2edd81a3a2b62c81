"""Verification of an installation: every collective against the ring reference.

cases         operations, dtypes, sizes, ways of submission, and the values
collectives   the interface of an exchange under test, runners of cases, and faults to inject
reference     the ring's results, the rounding bound, and the element with the largest error
running       one case after the other on all ranks: repeated, compared, findings exchanged
command       `hvdtrain verify`: the table, the JSON, and the explanation of a mismatch
"""

from hvdtrain.lab.verify.cases import Case, plan_cases
from hvdtrain.lab.verify.running import Result, run_cases

__all__ = ["Case", "Result", "plan_cases", "run_cases"]
