"""Sweeps: from an ablation to trials, groups, processes, and rows of a table."""
