"""Cost: predicts time and memory; pure functions of graph, hardware and plan."""
