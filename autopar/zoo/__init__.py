"""autopar.zoo."""
