"""Say whether this tree is the release that a tag names: `python tools/release.py v0.1.0`

The tag is v and the version of llmlab/base/version.py, and CHANGELOG.md has that version with its date.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def problems(tag: str, version: str, changelog: str) -> list[str]:
    """Return what keeps the tree of `version`, with this changelog, from being the release `tag`; a sentence each."""
    found = []
    if tag != f"v{version}":
        found.append(f"the tag is {tag or 'not given'}, and llmlab/base/version.py says {version}: tag it v{version}")
    heading = re.search(rf"^## {re.escape(version)}\b(.*)$", changelog, re.MULTILINE)
    if heading is None:
        found.append(f"CHANGELOG.md has no section of {version}")
    elif not re.search(r"\d{4}-\d\d-\d\d", heading[1]):
        found.append(f"CHANGELOG.md dates no release: write '## {version}, YYYY-MM-DD' over its section")
    return found


def main(tag: str) -> int:
    source = (ROOT / "llmlab" / "base" / "version.py").read_text("utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    found = problems(tag, version, (ROOT / "CHANGELOG.md").read_text("utf-8"))
    for each in found:
        print(f"Not released: {each}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
