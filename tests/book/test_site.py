"""What search engines and shared links read of the built site: needs `make site`, and no browser."""

import re
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "_build" / "html"
CONFIG = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
MOVED = {f"{old}.html" for old in CONFIG["sphinx"]["config"]["html_context"]["moved"]}
PAGES = sorted({path.relative_to(SITE).as_posix() for path in SITE.glob("book/**/*.html")} - MOVED)
ADDRESS = CONFIG["html"]["baseurl"]


def tags(page):
    """Return the page's meta tags, its canonical address and its title."""
    text = (SITE / page).read_text(encoding="utf-8")
    found = re.findall(r'<meta (?:property|name)="([\w:]+)" content="([^"]*)"', text)
    return {
        **{name: unescape(content) for name, content in found},
        "canonical": re.search(r'<link rel="canonical" href="([^"]*)"', text)[1],
        "title": unescape(re.search(r"<title>([^<]*)", text)[1]),
        "first paragraph": re.search(r"<article.*?<p>(.*?)</p>", text, re.DOTALL)[1],
    }


def test_there_are_pages_to_read():
    assert PAGES, "no pages in _build/html: run `make site`"


def test_the_sites_address_is_that_of_the_repository():
    owner, _, name = CONFIG["repository"]["url"].removeprefix("https://github.com/").partition("/")
    assert ADDRESS == CONFIG["sphinx"]["config"]["ogp_site_url"] == f"https://{owner}.github.io/{name}/"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_what_it_is(page):
    found = tags(page)
    assert found["canonical"] == found["og:url"] == ADDRESS + page
    assert found["og:title"] and found["title"].startswith(found["og:title"])
    assert found["description"] == found["og:description"] and 20 < len(found["description"]) <= 200
    said = re.sub(r"\W", "", unescape(re.sub(r"<[^>]*>|#", "", found["first paragraph"])))
    assert said.startswith(re.sub(r"\W", "", found["description"]))
    picture = SITE / found["og:image"].removeprefix(ADDRESS)
    assert picture.read_bytes().startswith(b"\x89PNG") and found["og:image:alt"] == found["description"]


def test_titles_and_descriptions_tell_the_pages_apart():
    for name in ("title", "description", "og:image"):
        assert len({tags(page)[name] for page in PAGES}) == len(PAGES), name


def test_the_sitemap_lists_every_page_and_nothing_else():
    sitemap = ElementTree.parse(SITE / "sitemap.xml").getroot()
    found = [entry.text for entry in sitemap.iter("{http://www.sitemaps.org/schemas/sitemap/0.9}loc")]
    assert sorted(found) == [ADDRESS + page for page in PAGES]
