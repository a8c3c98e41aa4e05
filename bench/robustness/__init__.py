"""Twins of cases as reality would have captured them, and how often the verdicts on them hold (README.md)."""
