"""The glossary is in alphabetical order, and each entry leads to a page of the book."""

import re
from pathlib import Path

BOOK = Path(__file__).resolve().parents[2] / "book"
ENTRIES = re.findall(r"^(\S.*)\n((?:  .*\n)+)", (BOOK / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_the_terms_are_in_alphabetical_order():
    terms = [term.lower().replace("µ", "mu").replace("-", " ") for term, _ in ENTRIES]
    assert len(terms) > 100 and terms == sorted(terms)


def test_each_entry_ends_with_the_page_that_teaches_the_term():
    for term, text in ENTRIES:
        link = re.search(r"\(\[[^]]+\]\(([\w-]+)\.(ipynb|md)\)\)\n$", text)
        assert link, term
        assert (BOOK / f"{link[1]}.{link[2]}").is_file(), f"{term}: {link[0]}"
