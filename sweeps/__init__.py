"""Sweeps: an ablation becomes trials, groups, processes, a table and a report."""
