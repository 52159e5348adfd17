"""What strategies are tried on: one file per workload."""
