"""Print what setup.cfg says dpuflow needs, one requirement a line; of the extras named as arguments, too."""

from __future__ import annotations

import sys
from configparser import ConfigParser
from pathlib import Path

config = ConfigParser()
config.read(Path(__file__).resolve().parents[1] / "setup.cfg")
texts = [config["options"]["install_requires"]]
texts += [config["options.extras_require"][extra] for extra in sys.argv[1:]]
for text in texts:
    for line in text.split("\n"):
        if line.strip():
            print(line.strip())
