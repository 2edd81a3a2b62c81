"""The live audits of the exchange and of the computation, and the trace of a run.

The audit of the exchange: at an audited step the local gradients of each rank are copied as the
backward pass produces them, before the exchange. They are reduced again, over a transport
independent of the exchange, and compared with the gradients that the optimizer is about to use:

capture     copies of the local gradients of an audit: of all, or of one of K parts, in blocks
checks      comparison within the proven rounding bound, or bit for bit
mismatch    the worst errors over all ranks, and the diagnosis of a mismatch
auditor     the audit of a training run, step by step
script      the audit of any other training loop: `from hvdtrain import GradientAudit`

It cannot detect a wrong local backward pass. Beside it:

compute     the audit of the computation: another rank computes a share's gradients again
trace       the records of steps, from which each can be checked later
digests     digests of batches, gradients and parameters, which both of these compare; and of all
            tensors of a step's passes, by which `hvdtrain diff` finds the first that differs
"""

from hvdtrain.audit.auditor import Auditor, AuditRecord, Audits

__all__ = ["AuditRecord", "Auditor", "Audits"]
