"""Which conditions are found in scripted jobs that have them, and what is found in those that have none."""
