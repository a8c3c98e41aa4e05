"""dpuflow's benchmark: a generated capture, peers that read the same fields, ratios of CPU time."""
