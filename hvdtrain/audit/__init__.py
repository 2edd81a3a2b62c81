"""The live audit: gradients for the optimizer, compared with the ring reference by element.

At an audited step the local gradients of each rank are copied as the backward pass produces them,
before the exchange. They are reduced again, over a transport independent of the exchange, and
compared with the gradients that the optimizer is about to use:

capture     copies of the local gradients of an audit: of all, or of one of K parts, in blocks
checks      comparison within the proven rounding bound, or bit for bit
mismatch    the worst errors over all ranks, and the diagnosis of a mismatch
auditor     the audit of a training run, step by step
script      the audit of any other training loop: `from hvdtrain import GradientAudit`

An audit of the exchange cannot detect a wrong local backward pass.
"""

from hvdtrain.audit.auditor import Auditor, AuditRecord, Audits

__all__ = ["AuditRecord", "Auditor", "Audits"]
