"""autopar.runtime."""
