"""Plots: one module and one function each, from a Subject or a DataFrame to a matplotlib Figure."""
