"""Result types as JSON, documents, their comparison, plots and the report."""
