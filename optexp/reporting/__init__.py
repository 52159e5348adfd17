"""What is told of a result: files, terminal, report and MLflow."""
