"""Compare llmlab's minimum versions with the packages of Colab: `python tools/colab_drift.py FILE-OR-URL`

The argument is a `pip freeze` listing; Colab publishes its own in googlecolab/backend-info. A minimum above Colab's
version would make pip replace a package (torch, at worst) in the reader's session: the exit code is then 1, and the
package is named.
"""

from __future__ import annotations

import sys
import urllib.request
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent


def read_listing(text: str) -> dict[str, Version]:
    """Return the version of each package in a `pip freeze` listing; lines without a version are skipped."""
    versions = {}
    for line in text.splitlines():
        name, separator, version = line.partition("#")[0].strip().partition("==")
        if separator:
            try:
                versions[canonicalize_name(name)] = Version(version)
            except InvalidVersion:
                continue
    return versions


def colab_requirements() -> list[Requirement]:
    """Return what the book's `pip install` line for Colab asks for: the base and the extras `plot` and `torch`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    every = [Requirement(text) for text in (*project["dependencies"], *extras["plot"], *extras["torch"])]
    return [one for one in every if one.marker is None or one.marker.evaluate({"python_version": "3.12"})]


def drift(requirements: list[Requirement], versions: dict[str, Version]) -> tuple[list[str], list[str]]:
    """Return one line per requirement, and the lines of the packages that pip would replace."""
    lines, replaced = [], []
    for requirement in requirements:
        have = versions.get(canonicalize_name(requirement.name))
        verdict = "not there, will be added" if have is None else f"has {have}"
        line = f"{requirement.name:14} {requirement.specifier!s:10} Colab {verdict}"
        if have is not None and not requirement.specifier.contains(have, prereleases=True):
            line += ": would be REPLACED"
            replaced.append(line)
        lines.append(line)
    return lines, replaced


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(__doc__.splitlines()[0], file=sys.stderr)
        return 2
    (source,) = arguments
    if "://" in source:
        with urllib.request.urlopen(source, timeout=60) as response:
            text = response.read().decode()
    else:
        text = Path(source).read_text(encoding="utf-8")
    versions = read_listing(text)
    if "torch" not in versions:
        print(f"{source} pins no torch: not a listing of Colab's packages", file=sys.stderr)
        return 2
    lines, replaced = drift(colab_requirements(), versions)
    print("\n".join(lines))
    return 1 if replaced else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
