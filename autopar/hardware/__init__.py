"""autopar.hardware."""
