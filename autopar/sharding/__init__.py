"""Sharding: placements, which of them each operator allows, and the collectives between them.

The vocabulary is DTensor's (Replicate, Shard, Partial). Cost, search and runtime all read this one package, so that
what is modelled is what runs.
"""
