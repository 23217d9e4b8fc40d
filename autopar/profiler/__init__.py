"""autopar.profiler."""
