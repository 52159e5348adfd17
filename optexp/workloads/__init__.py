"""Programs that strategies are tried on: one file per workload."""
