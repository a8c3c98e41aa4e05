"""Print what setup.cfg says dpuflow needs, one requirement a line; of the extras named as arguments, too.

``--build`` prints what pyproject.toml says it is built with.
"""

from __future__ import annotations

import re
import sys
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def needed(extras: list[str]) -> list[str]:
    """Requirements of the package and of extras, with those that they name in turn."""
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    named = config["options.extras_require"]
    texts = [config["options"]["install_requires"], *(named[extra] for extra in extras)]
    return [line.strip() for text in texts for line in text.split("\n") if line.strip()]


def built_with() -> list[str]:
    """The build system's requirements."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return re.findall(r'"([^"]+)"', text.partition("requires = [")[2].partition("]")[0])


print("\n".join(built_with() if sys.argv[1:] == ["--build"] else needed(sys.argv[1:])))
