"""Live audit: what the optimizer will use, compared with our own ring, element by element.

At an audited step each rank's local gradients are copied as the backward pass produces them,
before anything is exchanged. Over a transport that is not the exchange's own they are reduced
again, and compared with the gradients that the optimizer is about to use:

parts       which elements an audit looks at: all, or one of K parts that cover all in K audits
capture     copies local gradients as the backward pass produces them
bound       within the proven rounding bound?      (rounding explains no more than that)
exact       equal in every bit?                    (where the order of summation is known)
verdict     what a mismatch says: the reduction, or one rank's copy; and where
auditor     puts them together, step by step
script      the same in a training loop that is not ours: `from hvdtrain import GradientAudit`

What no audit of the exchange can see is a local backward pass that is wrong.
"""

from hvdtrain.audit.auditor import Auditor, AuditRecord, NoAudit

__all__ = ["AuditRecord", "Auditor", "NoAudit"]
