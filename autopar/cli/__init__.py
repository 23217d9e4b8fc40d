"""autopar.cli."""
