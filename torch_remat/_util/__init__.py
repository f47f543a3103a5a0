"""What the face, reports and budgets share: texts, tables, bytes, storages, imports on first use."""
