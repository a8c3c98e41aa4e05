"""The long-running service of one node: live capture in, collectives, lateness and findings out."""
