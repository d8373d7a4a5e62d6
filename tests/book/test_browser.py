"""Every built page in a real browser, without a network: nothing is missing, nothing breaks, it fits a phone.

Needs `make site` and a Chromium (Debian's package chromium, or Chrome). Where there is none the tests say that they
did not run; with LLMLAB_REQUIRE_BROWSER=1, as in continuous integration, that is a failure.
`make screenshots` also writes pictures of each page, light and wide, and dark on a phone, to _build/screenshots.
"""

import json
import os
import random
import re
import shutil
import threading
from contextlib import contextmanager
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlencode, urljoin

import pytest
import yaml

from llmlab.notebook.calculator import answer, form

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "_build" / "html"
SCREENSHOTS = ROOT / "_build" / "screenshots"
MOVED = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))["sphinx"]["config"]["html_context"]["moved"]
BUILT = {path.relative_to(SITE).as_posix() for path in SITE.glob("book/**/*.html")}
PAGES = sorted(BUILT - {f"{old}.html" for old in MOVED})
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
HERE = ("http://127.0.0.1:", "data:", "blob:")
WIDE, PHONE = 1280, 400  # px
PATIENCE = 300_000  # ms: a slow machine is not a failure


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def site():
    if not PAGES:
        pytest.fail("no pages in _build/html: run `make site`")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=SITE))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        reason = f"the browser tests were NOT run: none of {', '.join(BROWSERS)} is installed"
        if os.environ.get("LLMLAB_REQUIRE_BROWSER"):
            pytest.fail(reason)
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("profile"), executable_path=executable, headless=True, args=FLAGS
        )
        yield context
        context.close()


@contextmanager
def tab(browser, width=WIDE):
    """A tab that writes down what goes wrong (`problems`) and what it asks of other machines (`outside`)."""
    page = browser.new_page()
    page.problems, page.outside = [], []
    page.on("console", lambda message: note(page.problems, message.type in ("error", "warning"), message.text))
    page.on("pageerror", lambda error: note(page.problems, True, f"uncaught: {error}"))
    page.on("requestfailed", lambda request: note(page.problems, True, f"failed: {request.url}"))
    page.on("response", lambda answer: note(page.problems, answer.status >= 400, f"{answer.status}: {answer.url}"))
    page.on("request", lambda request: note(page.outside, not request.url.startswith(HERE), request.url))
    page.set_default_timeout(PATIENCE)
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme="light")
    yield page
    page.close()


@pytest.fixture
def page(browser):
    with tab(browser) as page:
        yield page


# Two processes share the pages; what is asked of one page is asked by one process, which has it open.
ONE_BY_ONE = [pytest.param(page, marks=pytest.mark.xdist_group(page)) for page in PAGES]


@pytest.fixture(scope="module", params=ONE_BY_ONE)
def wide(request, browser, site):
    """A page of the book, loaded once for all that is asked of it."""
    with tab(browser) as page:
        visit(page, site, request.param)
        page.name = request.param
        yield page


def note(where, happened, what):
    if happened:
        where.append(what)


def visit(page, site, name):
    page.goto(site + name, wait_until="load")
    page.evaluate("window.MathJax?.startup?.promise")
    # Images load as they come into view: bring them all.
    page.evaluate("""Promise.allSettled([...document.images].map(image => {
      image.loading = 'eager';
      return image.decode();
    }))""")


def test_the_first_page_is_the_books_introduction(page, site):
    page.goto(site + "index.html")
    page.wait_for_url("**/book/intro.html")
    assert "How to Train Your LLM" in page.title()


@pytest.mark.parametrize("scripts", [True, False], ids=["with scripts", "without scripts"])
@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_an_old_address_forwards_to_the_new_one(page, site, old, new, scripts):
    assert {f"{old}.html", f"{new}.html"} <= BUILT
    page.context.new_cdp_session(page).send("Emulation.setScriptExecutionDisabled", {"value": not scripts})
    page.goto(f"{site}{old}.html#predict-first")
    page.wait_for_url(f"{site}{new}.html" + "#predict-first" * scripts)  # a refresh has the page alone
    assert page.outside == []
    assert page.locator("article h1").is_visible()


def test_page_loads_whole_and_by_itself(wide):
    assert wide.problems == []
    assert wide.outside == []  # what a page needs, it brings: readers may be offline
    broken = wide.evaluate("[...document.images].filter(i => !i.naturalWidth).map(i => i.src)")
    assert broken == []
    unlabelled = wide.evaluate("[...document.querySelectorAll('article img')].filter(i => !i.alt).map(i => i.src)")
    assert unlabelled == []


@cache
def anchors(path):
    return set(re.findall(r'id="([^"]*)"', path.read_text(encoding="utf-8")))


def test_links_lead_somewhere(wide, site):
    links = wide.evaluate("[...document.querySelectorAll('a[href]')].map(a => a.getAttribute('href'))")
    missing = []
    for link in links:
        address, anchor = urldefrag(urljoin(site + wide.name, link))
        if not address.startswith(site) or link.startswith("javascript:"):
            continue
        target = SITE / (unquote(address.removeprefix(site)).partition("?")[0] or "index.html")
        if not target.is_file() or (anchor and unquote(anchor) not in anchors(target)):
            missing.append(link)
    assert missing == []


def test_mathematics_is_drawn(wide):
    source = (SITE / wide.name).read_text(encoding="utf-8")
    formulas = len(re.findall(r'class="math notranslate nohighlight"', source))
    drawn = wide.evaluate("document.querySelectorAll('mjx-container mjx-math').length")
    assert drawn >= formulas
    assert wide.locator("mjx-merror").count() == 0
    prose = wide.evaluate("""() => {
      const article = document.querySelector('article').cloneNode(true);
      article.querySelectorAll('pre, code, script, mjx-container').forEach(element => element.remove());
      return article.textContent;
    }""")
    assert re.findall(r"\$\$|\\\(|\\frac|\{term\}|\{cite\}|:::|```", prose) == []  # markup that nobody rendered


def in_scheme(page, scheme):
    """What a page does whose reader turns the lights out, or on."""
    page.emulate_media(color_scheme=scheme)
    page.wait_for_function("scheme => document.documentElement.dataset.theme === scheme", arg=scheme)


def fits(page, scheme):
    in_scheme(page, scheme)
    scores = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert scores <= 0, f"the page scrolls sideways by {scores} px"


def photograph(page, view):
    """For people to look at, where they asked for it: to draw a whole page takes longer than to load it."""
    if not os.environ.get("LLMLAB_SCREENSHOTS"):
        return
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    path = SCREENSHOTS / f"{Path(page.name).stem}-{view}.jpeg"
    page.screenshot(path=path, full_page=True, type="jpeg", quality=60)


def test_page_fits_the_screen(wide):
    fits(wide, "dark")
    fits(wide, "light")
    photograph(wide, "light")


def test_page_fits_a_phone(wide):
    wide.set_viewport_size({"width": PHONE, "height": 900})
    try:
        fits(wide, "light")
        fits(wide, "dark")
        photograph(wide, "phone-dark")
        assert wide.problems == []
    finally:
        wide.set_viewport_size({"width": WIDE, "height": 900})


def test_tables_are_legible_in_the_dark(wide):
    in_scheme(wide, "dark")
    # WCAG 2.1, 1.4.3: contrast of text of at least 4.5 to 1 against the first ancestor that has a background.
    poor = wide.evaluate("""() => {
      const rgb = text => text.match(/[\\d.]+/g).map(Number);
      const linear = c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
      const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
      const background = element => {
        for (let e = element; e; e = e.parentElement) {
          const colour = rgb(getComputedStyle(e).backgroundColor);
          if (colour.length === 3 || colour[3] === 1) return colour;
        }
        return [255, 255, 255];
      };
      return [...document.querySelectorAll('article td, article th')].filter(cell => {
        const [a, b] = [luminance(rgb(getComputedStyle(cell).color)), luminance(background(cell))];
        return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5;
      }).map(cell => cell.textContent);
    }""")
    assert poor == []


def serious(page):
    """Return the serious faults that axe finds, and an element of each.

    The contrast of thousands of words takes longer than everything else, so axe gets three texts of each tag,
    colour, size and background.
    """
    from axe_playwright_python.base import AXE_SCRIPT
    from axe_playwright_python.sync_playwright import Axe

    # A colour in the middle of a transition is nobody's to read.
    page.wait_for_function("document.getAnimations().every(each => each.playState !== 'running')")
    page.evaluate("""() => {
      const counts = {}, behind = new Map([[document, '']]);
      for (const element of document.querySelectorAll('*')) {
        const style = getComputedStyle(element), own = [style.backgroundColor, style.backgroundImage, style.opacity];
        const plain = own.join() === 'rgba(0, 0, 0, 0),none,1';
        behind.set(element, behind.get(element.parentNode) + (plain ? '' : own));
        const words = [...element.childNodes].some(node => node.nodeType === Node.TEXT_NODE && node.data.trim());
        const look = [element.localName, style.color, style.fontSize, style.fontWeight, behind.get(element)].join();
        const takes = words && element.checkVisibility() && (counts[look] = (counts[look] ?? 0) + 1) <= 3;
        element.toggleAttribute('data-contrast', takes);
      }
    }""")
    axe = Axe(AXE_SCRIPT + ";axe.configure({rules: [{id: 'color-contrast', selector: '[data-contrast]'}]})")
    found = axe.run(page, options={"resultTypes": ["violations"]}).response["violations"]
    return [(rule["id"], rule["nodes"][0]["html"]) for rule in found if rule["impact"] in ("serious", "critical")]


def test_a_screen_reader_finds_nothing_serious_wrong(wide):
    assert serious(wide) == []


def test_search_finds_a_term(page, site):
    page.goto(site + "search.html?q=activations", wait_until="networkidle")
    page.wait_for_selector("#search-results li a")
    assert page.locator("#search-results li a[href*='glossary']").count() > 0


def test_on_a_phone_the_contents_open_by_the_button(page, site):
    page.set_viewport_size({"width": PHONE, "height": 900})
    visit(page, site, "book/intro.html")
    link = page.locator("nav a[href='glossary.html']").first
    assert not link.is_visible()
    page.locator("button.primary-toggle:visible").first.click()
    page.wait_for_function("document.querySelector(\"nav a[href='glossary.html']\").checkVisibility()")


def test_a_notebook_page_opens_in_colab_and_is_edited_as_text(page, site):
    visit(page, site, "book/gpu-table.html")
    repository = "how-to-train-your-llm/how-to-train-your-llm"
    assert page.locator(f"a[href='https://colab.research.google.com/github/{repository}/blob/main/book/gpu-table.ipynb']").count()
    assert page.locator(f"a[href='https://github.com/{repository}/edit/main/book/gpu-table.md']").count()


def test_the_cheat_sheet_is_the_two_sides_of_one_sheet_of_paper(page, site):
    visit(page, site, "book/cheat-sheet.html")
    printed = page.pdf(prefer_css_page_size=True)
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) == 2
    box = re.search(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)", printed)
    assert [round(float(side) * 25.4 / 72) for side in box.groups()] == [210, 297]  # mm: A4


# ---- the calculator

CALCULATOR = "book/will-it-fit.html"
WITH_PYTHON = (SITE / "_static" / "pyodide" / "pyodide.asm.wasm").exists()
in_browser = pytest.mark.skipif(not WITH_PYTHON, reason="the site was built without Pyodide, which was not to be had")
NONSENSE = [{"gpu": "<b>T5</b>"}, {"model": '{"a": 1}'}, {"kind": "dreaming"}]


def calculator_at(page, site, **state):
    """Open the calculator with `state` in its address, and wait for its answer."""
    page.goto("about:blank")
    address = "#" + urlencode(state) if state else ""
    page.goto(site + CALCULATOR + address)
    page.wait_for_selector(f"#calculator[data-answers='{address}']")


def shown(page, name="report.json"):
    """The report, or the plan, that the page offers to download."""
    link = page.locator(f"#calculator a[download='{name}']").get_attribute("href")
    return numbers(unquote(link.partition(",")[2]))


def numbers(text):
    """JSON with ten digits of each float: the last ones are the C library's, and Pyodide has another."""
    return json.loads(text, parse_float=lambda digits: float(f"{float(digits):.10g}"))


def random_state(pick):
    fields = form()
    kind = pick.choice(["training", "serving"])
    state = {"kind": kind, "gpus": pick.choice(["1", "8"])}
    state |= {name: pick.choice(fields[name + "s"])["name"] for name in ("model", "gpu")}
    for field in pick.sample(fields[kind], 4):
        state[field["name"]] = pick.choice(field.get("options") or {"flag": ["yes"]}.get(field["kind"], ["2", "4"]))
    return state


@in_browser
def test_the_calculator_answers_as_the_command_line_does(page, site):
    calculator_at(page, site)
    pick = random.Random(25)
    for state in [random_state(pick) for _ in range(50)]:
        expected = answer({**form()["defaults"], **state})
        address = "#" + urlencode(state)
        page.evaluate("address => { location.hash = address }", address)
        page.wait_for_selector(f"#calculator[data-answers='{address}']")
        if "error" in expected:
            assert page.locator("#calculator .problem").inner_text() == expected["error"]
        else:
            assert shown(page) == numbers(json.dumps(expected["report"]))
            assert page.locator("#calculator .headline").inner_text() == expected["headline"]
    assert page.problems == [] and page.outside == []


@in_browser
def test_the_calculator_works_by_keyboard_and_marks_what_changed(page, site):
    calculator_at(page, site)
    before = shown(page)["peak_allocated"]
    page.focus("#llmlab-gpus")
    page.keyboard.press("Tab")
    page.keyboard.press("Control+A")
    page.keyboard.type("4")
    page.wait_for_function("[...document.querySelectorAll('#calculator .delta')].some(cell => cell.textContent)")
    assert shown(page)["run"]["micro_batch"] == 4
    assert shown(page)["peak_allocated"] > before
    assert page.url.endswith("#micro_batch=4")
    chapters = [link.get_attribute("href") for link in page.locator("#calculator .levers a").all()]
    assert chapters and {f"book/{chapter.removeprefix('./')}" for chapter in chapters} <= BUILT


@in_browser
def test_the_calculator_plans_as_the_command_line_does_by_keyboard(page, site):
    state = {"kind": "planning", "model": "meta-llama/Llama-3.2-1B", "gpu": "A100-40GB", "gpus": "4", "seq_len": "1024"}
    calculator_at(page, site, **state)
    assert shown(page, "plan.json") == numbers(json.dumps(answer(state)["report"]))
    page.focus("#llmlab-global_batch")
    page.keyboard.press("Control+A")
    page.keyboard.type("16")
    page.keyboard.press("Enter")  # a search takes seconds: typing alone starts none
    page.wait_for_function("document.querySelector('#calculator caption').textContent.includes(' 16 sequences')")
    expected = answer({**state, "global_batch": "16"})
    assert shown(page, "plan.json") == numbers(json.dumps(expected["report"]))
    assert page.locator("#calculator .headline").inner_text() == expected["headline"]
    assert "no simulation confirmed them" in page.locator("#calculator .plan p").inner_text()
    assert "global_batch=16" in page.url
    page.locator("#calculator .plan th button").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#calculator .bar")
    best = expected["report"]["candidates"][0]
    assert shown(page)["run"] == {"kind": "training", **best["run"]}
    assert page.locator("#llmlab-kind-training").is_checked()
    assert page.problems == [] and page.outside == []


@in_browser
def test_a_plan_fits_a_phone_and_a_screen_reader_finds_nothing_serious_wrong(page, site):
    page.set_viewport_size({"width": PHONE, "height": 900})
    calculator_at(page, site, kind="planning", model="gpt2", gpu="A100-40GB", gpus="2", seq_len="512")
    for scheme in ("light", "dark"):
        fits(page, scheme)
        assert serious(page) == []


@in_browser
def test_nonsense_leaves_the_last_good_answer(page, site):
    calculator_at(page, site, gpu="T4", model="gpt2", seq_len="512", precision="fp32")
    good = shown(page)
    page.fill("#llmlab-gpus", "minus one")
    page.wait_for_selector("#calculator .problem")
    assert "not a whole number" in page.locator("#calculator .problem").inner_text()
    assert shown(page) == good


@in_browser
def test_an_address_with_nonsense_in_it_is_a_sentence_or_ignored(page, site):
    calculator_at(page, site, nonsense="1")
    assert shown(page)
    for state in NONSENSE:
        page.evaluate("address => { location.hash = address }", "#" + urlencode(state))
        page.wait_for_selector(f"#calculator[data-answers='#{urlencode(state)}']")
        assert page.locator("#calculator .problem").inner_text()
    assert page.problems == []


@pytest.mark.parametrize("without", ["WebAssembly", "Python"])
def test_without_what_the_calculator_needs_the_page_shows_the_command(page, site, without):
    if without == "WebAssembly":
        page.add_init_script("delete globalThis.WebAssembly")
    else:
        page.route("**/built.json", lambda route: route.fulfill(json={"python": False}))
    page.goto(site + CALCULATOR)
    page.wait_for_selector("#calculator-instead", state="visible")
    said = page.locator("#calculator-instead").inner_text()
    assert "llmlab estimate meta-llama/Llama-3.1-8B --gpu RTX-4090" in said
    assert ("WebAssembly" if without == "WebAssembly" else "Pyodide") in said
