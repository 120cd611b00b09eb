"""Implementations of attention; see `attention.api` for their common interface."""
