"""Captures whose clocks nothing ties: each island analysed on its own, the results put beside each other."""
