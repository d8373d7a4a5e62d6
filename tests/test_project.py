"""The files around the package say the same: two commands, one set of dependencies, one Colab line, one address."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))  # scripts, not a package

import figures  # noqa: E402
import release  # noqa: E402
import stamp  # noqa: E402

from llmlab.base.version import BOOK  # noqa: E402

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*/[RH]*.md")]


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def project():
    return tomllib.loads(read("pyproject.toml"))["project"]


def make_extras():
    return re.search(r"^EXTRAS \?= (\S+)$", read("Makefile"), re.MULTILINE)[1]


def make_targets():
    return set(re.findall(r"^([a-z-]+):(?!=)", read("Makefile"), re.MULTILINE))


def run_lines(workflow):
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


def text_files():
    made = {".git", ".venv", "_build", ".pytest_cache", ".ruff_cache", ".hypothesis", "__pycache__", "llmlab.egg-info"}
    paths = [path for path in ROOT.rglob("*") if not made.intersection(path.relative_to(ROOT).parts)]
    return [path for path in paths if path.is_file() and path.suffix not in (".png", ".pickle")]


# ---- the commands


def test_continuous_integration_runs_the_command_that_the_readme_gives():
    assert read(".ci/run").rstrip().splitlines()[-1].split()[:2] == ["make", "test"]
    assert run_lines(ROOT / ".github/workflows/ci.yml") == ["make test"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_command_that_a_document_shows_exists(document):
    """Of make's targets, and of files that Python runs."""
    for block in re.findall(r"```bash\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL):
        assert set(re.findall(r"\bmake ([a-z-]+)", re.sub("#.*", "", block))) <= make_targets()
        assert all((ROOT / script).is_file() for script in re.findall(r"\bpython ([\w/]+\.py)", block))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_link_of_a_document_leads_to_a_file(document):
    text = document.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if not link.startswith("http")]
    assert [link for link in links if not (document.parent / link).exists()] == []
    pages = re.findall(rf"{re.escape(BOOK)}/([\w-]+)\.html", text)
    assert [page for page in pages if not (ROOT / "book" / f"{page}.md").is_file()] == []


def test_make_test_runs_every_check():
    needs = re.search(r"^test: ([a-z ]+) ##", read("Makefile"), re.MULTILINE)[1].split()
    assert needs == ["lint", "dist", "unit", "nbval", "site", "browser", "durations"]


def test_ci_covers_every_python_that_the_package_promises():
    ci = yaml.safe_load(read(".github/workflows/ci.yml"))
    assert tuple(ci["jobs"]["test"]["strategy"]["matrix"]["python"]) == PYTHONS
    assert project()["requires-python"] == f">={PYTHONS[0]}"


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_make_targets(workflow):
    for line in run_lines(workflow):
        for target in re.findall(r"\bmake ([a-z-]+)", re.sub(r"(?:install|-v) .*", "", line)):
            assert target in make_targets(), f"{workflow.name} runs make {target}, which the Makefile lacks"
        prepares_the_image = "apt-get" in line  # before the checkout there is no Makefile
        assert prepares_the_image or line.startswith("make ")


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_where_make_test_runs_a_missing_browser_is_a_failure(workflow):
    content = yaml.safe_load(workflow.read_text(encoding="utf-8"))
    for job in content["jobs"].values():
        if any(step.get("run") == "make test" for step in job["steps"]):
            assert {**content.get("env", {}), **job.get("env", {})}.get("LLMLAB_REQUIRE_BROWSER") == "1"


def test_the_gpu_workflow_runs_the_cuda_tests_and_the_notebooks_on_a_pretended_t4():
    job = yaml.safe_load(read(".github/workflows/gpu.yml"))["jobs"]["notebooks"]
    steps = {step["run"].split()[1]: step for step in job["steps"] if step.get("run", "").startswith("make ")}
    assert list(steps) == ["unit", "gpu-notebooks", "records"]  # unit: before records change what it tests
    pretended = [entry.get("pretend") for entry in job["strategy"]["matrix"]["include"]]
    assert pretended == [None, None, "t4"]
    assert steps["gpu-notebooks"]["env"] == {"LLMLAB_AS": "${{ matrix.pretend }}"}
    for target in ("unit", "records"):  # records are of real GPUs, and tests set LLMLAB_AS themselves
        assert steps[target]["if"] == "${{ !matrix.pretend }}" and "env" not in steps[target]


# ---- the dependencies


def test_conda_installs_what_make_installs():
    environment = yaml.safe_load(read("environment.yml"))
    conda = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    (pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    newest = PYTHONS[-1].partition(".")[2]  # conda would take the newest there is, tested or not
    assert conda == [f"python{project()['requires-python']},<3.{int(newest) + 1}", "pip"]
    assert pip == ["-c constraints.txt", f"-e .[{make_extras()}]"]


@pytest.mark.parametrize("python", PYTHONS)
def test_constraints_pin_every_dependency_within_its_floor(python):
    pins = {}
    at = {"python_version": python, "python_full_version": f"{python}.9", "sys_platform": "linux"}
    for line in read("constraints.txt").splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            if pin.marker is None or pin.marker.evaluate({**at, "platform_machine": "x86_64"}):
                assert canonicalize_name(pin.name) not in pins, f"{pin.name} is pinned twice for Python {python}"
                (exact,) = pin.specifier
                pins[canonicalize_name(pin.name)] = Version(exact.version)
    extras, asked = project()["optional-dependencies"], ("plot", *make_extras().split(","))
    wanted = project()["dependencies"] + [text for extra in asked for text in extras[extra]]
    for requirement in map(Requirement, wanted):
        if requirement.name in ("triton", "llmlab"):
            continue  # left to torch, as below; another extra of ours
        if requirement.marker is None or requirement.marker.evaluate(at):
            assert pins[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_constraints_leave_cuda_to_torch():
    assert not re.search(r"^(nvidia|cuda|triton)", read("constraints.txt"), re.MULTILINE)


def test_the_floors_pin_nothing():
    for texts in [project()["dependencies"], *project()["optional-dependencies"].values()]:
        for requirement in map(Requirement, texts):
            assert {part.operator for part in requirement.specifier} <= {">=", "<"}, requirement


# ---- Colab


def modules(extra: str) -> set[str]:
    """The modules that an extra's packages are imported by; one whose import has another name is named so here."""
    named = {Requirement(text).name for text in project()["optional-dependencies"][extra]}
    return {{"nvidia-ml-py": "pynvml"}.get(name, name.replace("-", "_")) for name in named}


# serve and llama-cpp are for readers who ask for them: vLLM replaces Colab's torch, and llama.cpp is built for minutes.
OPTIONAL = {"gpu": {"liger_kernel"}, "distributed": {"deepspeed"}, "evaluate": {"lm_eval", "rouge_score", "sacrebleu"}}


@pytest.mark.parametrize("page", sorted((ROOT / "book").glob("*.md")), ids=lambda page: page.stem)
def test_a_chapters_colab_line_adds_what_its_code_imports(page):
    (line,) = re.findall(r"^ *(%pip .*)$", read("book/_setup.ipy"), re.MULTILINE)
    assert set(re.findall(r"^ *(%pip .*)$", read("README.md"), re.MULTILINE)) <= {line}
    usual = Requirement(re.search(r'"(.*)"', line)[1])
    assert all(names <= modules(extra) for extra, names in OPTIONAL.items())
    code = "\n".join(re.findall(r"^```{code-cell}.*?^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL))
    if lines := set(re.findall(r"%pip .*", code)):
        (requirement,) = (Requirement(re.search(r'"(.*)"', each)[1]) for each in lines)
        wanted = {extra for extra, names in OPTIONAL.items() if names & set(re.findall(r"\w+", code))}
        assert requirement.extras == usual.extras | wanted
        assert (requirement.name, requirement.url) == (usual.name, usual.url)


# ---- what is out of date


def test_a_stamp_follows_contents_not_times(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/a.toml").write_text("x = 1")
    command = [sys.executable, "-c", "open('runs', 'a').write('.')"]

    def make():
        assert stamp.main(["stamps/made", "data", "--", *command]) == 0
        return len(Path("runs").read_text())

    assert (make(), make()) == (1, 1)
    Path("data/a.toml").touch()
    assert make() == 1
    Path("data/a.toml").write_text("x = 2")
    assert make() == 2
    Path("data/a.toml").rename("data/b.toml")
    assert make() == 3


def test_a_failed_command_is_never_up_to_date(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data").write_text("1")
    for _ in range(2):
        assert stamp.main(["made", "data", "--", sys.executable, "-c", "raise SystemExit(3)"]) == 3
    assert not Path("made").exists()


# ---- the project as a whole


def test_one_address_everywhere():
    config = yaml.safe_load(read("_config.yml"))
    home = config["repository"]["url"]
    assert f"{BOOK}/" == config["html"]["baseurl"] + "book/"
    assert project()["urls"]["Homepage"] == home
    assert yaml.safe_load(read("CITATION.cff"))["repository-code"] == home
    said = {
        "book/_setup.ipy": r"git\+https://github.com/([^\"]+)",
        "tests/book/test_browser.py": r'repository = "(.*)"',
    }
    for name, pattern in said.items():
        assert set(re.findall(pattern, read(name))) == {home.removeprefix("https://github.com/")}, name
    opened = re.findall(r"colab.research.google.com/github/([\w-]+/[\w-]+)/", read("README.md"))
    assert set(opened) <= {home.removeprefix("https://github.com/")}


def test_versions_agree():
    import llmlab

    assert llmlab.__version__ == yaml.safe_load(read("CITATION.cff"))["version"]


def test_the_first_pages_map_is_what_the_package_estimates():
    """Within a hundredth: the last digit of a time depends on the C library."""

    def parts(text):
        return re.split(r"\d+\.\d\d|\d+%", text), [float(n) for n in re.findall(r"\d+\.\d\d", text)]

    words, numbers = parts(read("book/_map.html"))
    assert parts(figures.technique_map()) == (words, pytest.approx(numbers, abs=0.011))


@pytest.mark.parametrize(("tag", "heading", "words"), [
    ("v1.2.3", "## 1.2.3, 2026-11-24", []),
    ("v1.2", "## 1.2.3, 2026-11-24", ["tag it v1.2.3"]),
    ("", "## 1.2.3, 2026-11-24", ["the tag is not given"]),
    ("v1.2.3", "## 1.2.3, unreleased", ["dates no release"]),
    ("v1.2.3", "## 1.2.30, 2026-11-24", ["has no section of 1.2.3"]),
    ("v1", "", ["tag it v1.2.3", "no section"]),
])  # fmt: skip
def test_a_tree_is_the_release_that_its_tag_names(tag, heading, words):
    found = release.problems(tag, "1.2.3", f"# Changelog\n\n{heading}\n")
    assert len(found) == len(words) and all(word in each for word, each in zip(words, found, strict=True)), found


def test_the_wheel_works_where_it_is_installed(tmp_path):
    """Built from this tree and unpacked elsewhere: the command answers from there, with all of its tables."""
    for name in ("pyproject.toml", "README.md", "LICENSE", "LICENSE-TEXT"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "llmlab", tmp_path / "llmlab", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", "wheel", "."], cwd=tmp_path, check=True)
    (wheel,) = (tmp_path / "wheel").iterdir()
    subprocess.run([*pip, "install", "--no-deps", "--target", "site", str(wheel)], cwd=tmp_path, check=True)
    (tmp_path / "away").mkdir()
    command = [sys.executable, "-m", "llmlab", "estimate", "gpt2", "--gpu", "T4", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(command, cwd=tmp_path / "away", env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["outcome"] == "fits" and report["step_seconds"] > 0
    promised = re.search(r'uvx --from "llmlab @ git\+\S+" +llmlab (.*)', read("README.md").replace("\\\n", ""))[1]
    command = [sys.executable, "-m", "llmlab", *shlex.split(promised, comments=True)]
    done = subprocess.run(command, cwd=tmp_path / "away", env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    where = [sys.executable, "-c", "import llmlab; print(llmlab.__file__)"]
    used = subprocess.run(where, cwd=tmp_path / "away", env=environment, capture_output=True, text=True, check=True)
    assert Path(used.stdout.strip()).is_relative_to(tmp_path / "site")


def test_package_data_reaches_an_installation():
    patterns = tomllib.loads(read("pyproject.toml"))["tool"]["setuptools"]["package-data"]["llmlab"]
    kinds = {path.suffix for path in (ROOT / "llmlab").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert kinds - {".py", ".typed", ".pyc"} <= {Path(pattern).suffix for pattern in patterns}


def test_no_file_names_a_path_of_one_machine():
    # Built here so that this file does not hold what it looks for.
    machine = re.compile(r"(?<![\w.])/(?:" + "|".join(["home/[a-z]", "root/[.a-z]", "work/[a-z]", "Users/[a-z]"]) + ")")
    for path in text_files():
        rows = machine.search(path.read_text(encoding="utf-8", errors="replace"))
        assert rows is None, f"{path.relative_to(ROOT)}: {rows[0]}"
