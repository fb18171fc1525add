"""Audit the data before training: what is trained on, what overlaps, what is wrong with it."""

from data_modules.audit.audit import audit_documents
from data_modules.audit.figures import Audit, BenchmarkAudit, DatasetAudit
from data_modules.audit.rules import AuditConfig, DatasetFacts, RunSettings

__all__ = [
    "Audit",
    "AuditConfig",
    "BenchmarkAudit",
    "DatasetAudit",
    "DatasetFacts",
    "RunSettings",
    "audit_documents",
]
