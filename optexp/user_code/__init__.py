"""Users' own code as a workload."""
