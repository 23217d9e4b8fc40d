"""The search: placements inside blocks, stages over the chain, meshes and schedules, and the driver that proves."""
