"""A page's description, for search engines and for the cards that links show, is its first paragraph.

sphinxext-opengraph takes the first 200 characters, which on a page that opens with a short question go on into the alt
text of its first picture.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Set
from typing import Any

import sphinxext.opengraph
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.nodes import clean_astext


def description(doctree: nodes.document, length: int, titles: Set[str] = frozenset()) -> str:
    """Return the first paragraph, cut between words to `length` characters; the title where a page has no paragraph."""
    texts = [clean_astext(node) for node in doctree.findall(nodes.paragraph)]
    text = next((" ".join(text.split()) for text in texts if text.strip()), next(iter(titles), ""))
    return html.escape(textwrap.shorten(text, length, placeholder=" …"))


def setup(app: Sphinx) -> dict[str, Any]:
    sphinxext.opengraph.get_description = description
    return {"parallel_read_safe": True, "parallel_write_safe": True}
