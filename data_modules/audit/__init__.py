"""Audit before training which tokens are trained on, and what is wrong with the data."""

from data_modules.audit.audit import audit_documents
from data_modules.audit.figures import Audit, BenchmarkAudit, DatasetAudit
from data_modules.audit.overlap import Columns
from data_modules.audit.rules import AuditConfig, DatasetFacts, RunSettings, check_audit

__all__ = [
    "Audit",
    "AuditConfig",
    "BenchmarkAudit",
    "Columns",
    "DatasetAudit",
    "DatasetFacts",
    "RunSettings",
    "audit_documents",
    "check_audit",
]
