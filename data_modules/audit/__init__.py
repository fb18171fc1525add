"""Say before training what will be learned, and what is wrong with it."""

from data_modules.audit.audit import (
    Asked,
    Audit,
    AuditConfig,
    BenchmarkAudit,
    Columns,
    DatasetAudit,
    DatasetFacts,
    audit_documents,
    check_audit,
)

__all__ = [
    "Asked",
    "Audit",
    "AuditConfig",
    "BenchmarkAudit",
    "Columns",
    "DatasetAudit",
    "DatasetFacts",
    "audit_documents",
    "check_audit",
]
