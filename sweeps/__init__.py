"""Sweeps: expand an ablation into trials, train them in groups, report the results."""
