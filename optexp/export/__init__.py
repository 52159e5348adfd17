"""repro.py: the optimized program as one file of plain PyTorch."""
