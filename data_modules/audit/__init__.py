"""Say before training what will be learned, and what is wrong with it."""

from data_modules.audit.audit import audit_documents
from data_modules.audit.figures import Audit, BenchmarkAudit, DatasetAudit
from data_modules.audit.overlap import Columns
from data_modules.audit.rules import Asked, AuditConfig, DatasetFacts

__all__ = [
    "Asked",
    "Audit",
    "AuditConfig",
    "BenchmarkAudit",
    "Columns",
    "DatasetAudit",
    "DatasetFacts",
    "audit_documents",
]
