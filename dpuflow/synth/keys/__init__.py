"""What a scenario may say: one dataclass for each mapping, every key with its meaning and default.

docs/synth.md lists them (``python -m dpuflow.synth.describe``).
"""
