"""autopar.export."""
