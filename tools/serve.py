"""Serve the built site on localhost only: `python tools/serve.py PORT FOLDER`. Ctrl-C ends it."""

from __future__ import annotations

import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer


def main(port: str, folder: str) -> int:
    try:
        server = ThreadingHTTPServer(("127.0.0.1", int(port)), partial(SimpleHTTPRequestHandler, directory=folder))
    except (OSError, OverflowError, ValueError) as error:
        print(f"port {port}: {error}. Choose another: make read PORT=8001", file=sys.stderr)
        return 1
    with server:
        print(f"The book: http://127.0.0.1:{port}/  (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
