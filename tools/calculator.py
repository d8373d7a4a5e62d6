"""Put Python and llmlab beside the page "Will it fit?": `python tools/calculator.py SITE`, the built site's folder.

Pyodide comes from npm's registry, of one version with one hash, and is kept in `_build/pyodide`. Where it cannot be had
the site stays whole: the page says so and shows the command line instead.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import sys
import tarfile
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = "314.0.7"
ADDRESS = f"https://registry.npmjs.org/pyodide/-/pyodide-{VERSION}.tgz"
SHA256 = "66b7949e5a0cba2250b586d7e368bf12fb482800748d182c4618254b685ffaa0"
# What a worker loads; the rest of the archive are types, source maps and a console.
RUNTIME = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
LEFT_OUT = ("architectures/small_llama/",)  # a trained model and its text, which need torch


def runtime(kept: Path) -> Path | None:
    """Return the folder of Pyodide's files, downloaded once; None where the registry cannot be reached."""
    if all((kept / name).exists() for name in RUNTIME):
        return kept
    try:
        with urllib.request.urlopen(ADDRESS, timeout=60) as response:
            packed = response.read()
    except (urllib.error.URLError, TimeoutError) as error:
        print(f"The calculator's page says how to ask on the command line instead: {ADDRESS}: {error}")
        return None
    if (got := hashlib.sha256(packed).hexdigest()) != SHA256:
        raise SystemExit(f"{ADDRESS} has SHA-256 {got}, not {SHA256}: it is not the file that was tested")
    kept.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for name in RUNTIME:
            source = archive.extractfile(f"package/{name}")
            assert source is not None
            unfinished = kept / f"{name}.part"
            unfinished.write_bytes(source.read())
            unfinished.replace(kept / name)
    return kept


def package() -> bytes:
    """Return llmlab of this tree as a zip archive: its Python and its tables."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted((ROOT / "llmlab").rglob("*")):
            name = path.relative_to(ROOT).as_posix()
            wanted = path.suffix in {".py", ".toml", ".json"} and not any(part in name for part in LEFT_OUT)
            if wanted and "__pycache__" not in path.parts:
                archive.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def main(site: str) -> int:
    static = Path(site) / "_static"
    (static / "calculator").mkdir(parents=True, exist_ok=True)
    for name in ("calculator.mjs", "calculator.css"):
        shutil.copy(ROOT / "llmlab" / "notebook" / name, static / "calculator" / name)
    (static / "llmlab.zip").write_bytes(package())
    kept = runtime(ROOT / "_build" / "pyodide")
    if kept:
        shutil.copytree(kept, static / "pyodide", dirs_exist_ok=True)
    (static / "calculator" / "built.json").write_text(json.dumps({"python": bool(kept)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
