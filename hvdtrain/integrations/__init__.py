"""Callbacks for the trainers of other libraries, whose gradients torch's DDP exchanges.

Their scripts run unchanged under `hvdtrain launch -np N -- python script.py`. A callback adds the
audit of the gradients, and reports of progress to the launcher's watchdog:

transformers    `AuditCallback` for the Trainer of Hugging Face transformers
lightning       `AuditCallback` for the Trainer of Lightning
ddp             what both do, for any loop around DistributedDataParallel

Each library is imported only in the module of its name.
"""
