"""How near an analysis comes to what is known to have happened (docs/scoring.md).

``truth`` reads a case, ``score`` matches and counts, ``expected`` holds the verdicts to be expected.
"""
