"""The live audit: gradients for the optimizer, compared with the ring reference by element.

At an audited step the local gradients of each rank are copied as the backward pass produces them,
before the exchange. They are reduced again, over a transport independent of the exchange, and
compared with the gradients that the optimizer is about to use:

capture     elements of an audit (all, or one of K parts that cover all in K audits), in blocks;
            copies of their local gradients
checks      two comparisons: within the proven rounding bound, and equal in every bit (if the order
            of summation is known)
mismatch    the worst errors of a comparison over all ranks; diagnosis of a mismatch: the reduction
            or the copy of one rank, and the location
auditor     the audit of a training run, step by step
script      the audit of any other training loop: `from hvdtrain import GradientAudit`

An audit of the exchange cannot detect a wrong local backward pass.
"""

from hvdtrain.audit.auditor import Auditor, AuditRecord, NoAudit

__all__ = ["AuditRecord", "Auditor", "NoAudit"]
