"""Presentation of a result: files, terminal, report and MLflow."""
