"""Does this installation compute what it should? Every collective against the ring reference.

cases.py      what is tried: operations, dtypes, sizes, ways of submission, and the values
collectives   the contract that an exchange fulfils to be verified, and the one that spoils results
reference.py  what is right: the ring's results, the rounding bound, the element furthest out
running.py    a case on all ranks: reduced several times, compared, told to one another
report.py     the table, the JSON, and what is said of a mismatch
"""

from hvdtrain.lab.verify.cases import Case, plan_cases
from hvdtrain.lab.verify.running import Result, run_cases

__all__ = ["Case", "Result", "plan_cases", "run_cases"]
