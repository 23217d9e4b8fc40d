"""autopar.model."""
