"""Move the project to another address: `python tools/address.py https://github.com/OWNER/NAME`

pyproject.toml says where the project lives. What repeats it in other files (the Colab lines of chapters, badges, the
site's address, CITATION.cff) is rewritten with it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ADDRESS = re.compile(r"https://github\.com/([\w.-]+)/([\w.-]+?)/?")


def parts(address: str) -> tuple[str, str]:
    """Return owner and name of a repository on GitHub; ValueError for another address."""
    if not (found := ADDRESS.fullmatch(address)):
        raise ValueError(f"{address} is not https://github.com/OWNER/NAME")
    return found[1], found[2]


def home() -> str:
    """Return the address that pyproject.toml has."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^Homepage = "(.*)"$', text, re.MULTILINE)
    assert found  # a test reads it too
    return found[1]


def moved(text: str, old: str, new: str) -> str:
    """Return `text` with the repository's address, and that of the site which GitHub makes of it, in place of the old.

    >>> moved("https://a.github.io/b/ and /github/a/b/blob", "https://github.com/a/b", "https://github.com/c/d")
    'https://c.github.io/d/ and /github/c/d/blob'
    """
    (owner, name), (new_owner, new_name) = parts(old), parts(new)
    for of, its in ((f"{owner}.github.io/{name}", f"{new_owner}.github.io/{new_name}"),
                    (f"{owner}/{name}", f"{new_owner}/{new_name}")):  # fmt: skip
        text = re.sub(rf"(?<![\w-]){re.escape(of)}(?![\w-])", its, text)
    return text


def main(words: list[str]) -> int:
    try:
        (new,) = words
        parts(new)
    except ValueError as error:
        print(f"{error}\nusage: python tools/address.py https://github.com/OWNER/NAME", file=sys.stderr)
        return 2
    old = home()
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    changed = 0
    for path in (ROOT / name for name in listed.split("\0") if name):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a picture
            continue
        if (after := moved(text, old, new)) != text:
            path.write_text(after, encoding="utf-8")
            changed += 1
    print(f"{old} is now {new}, in {changed} files")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
