"""Validation: published training runs, predicted and compared with what was measured."""
