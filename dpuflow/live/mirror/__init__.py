"""Copies of traffic to where it can be captured, set up for as long as they are wanted, and undone."""
