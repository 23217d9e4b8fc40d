"""Runtime: trains with a plan on torch.distributed. Never imports the planner."""
