"""``python -m dpuflow``: the same as the ``dpuflow`` command."""

from dpuflow.cli import main

main()
