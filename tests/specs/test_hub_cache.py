"""Models of the hub by name: read from Hugging Face's cache, and fetched into it when a user asks for that."""

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from unittest import mock

import pytest

import llmlab as lab
from llmlab.specs import hub_cache

NAME = "some-lab/Little-7B"
CONFIG = {**lab.model("HuggingFaceTB/SmolLM2-135M").config, "num_hidden_layers": 7}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def put(cache, name, config):
    entry = cache / hub_cache.entry_of(name)
    (entry / "refs").mkdir(parents=True)
    (entry / "refs" / "main").write_text("abc\n")
    (entry / "snapshots" / "abc").mkdir(parents=True)
    (entry / "snapshots" / "abc" / "config.json").write_text(json.dumps(config))


def test_a_name_is_read_from_the_cache(cache):
    with pytest.raises(lab.UnknownName, match=f"llmlab models --download {NAME}"):
        lab.model(NAME)
    put(cache, NAME, CONFIG)
    spec = lab.model(NAME)
    assert (spec.name, spec.layers) == (NAME, 7)
    assert lab.estimate(NAME, lab.Training(seq_len=64), "T4").outcome == "fits"


def test_a_preset_hides_what_the_cache_has(cache):
    put(cache, "HuggingFaceTB/SmolLM2-135M", CONFIG)
    assert lab.model("HuggingFaceTB/SmolLM2-135M").layers == 30


@pytest.mark.parametrize("config", ["[]", "{", json.dumps({"model_type": "llama"})])
def test_a_broken_entry_is_said_to_be(cache, config):
    put(cache, NAME, CONFIG)
    (hub_cache.snapshot(NAME, cache) / "config.json").write_text(config)
    with pytest.raises(lab.SpecError):
        lab.model(NAME)


class Hub(BaseHTTPRequestHandler):
    """As the hub answers: one model, one without a config, one that is gated, and nothing else."""

    def do_HEAD(self):
        body = json.dumps(CONFIG).encode()
        errors = {"empty": (404, "EntryNotFound"), "gated": (403, "GatedRepo")}
        found = next((errors[name] for name in errors if name in self.path), (404, "RepoNotFound"))
        here = self.path == f"/{NAME}/resolve/main/config.json"
        self.send_response(200 if here else found[0])
        headers = {"ETag": '"1"', "X-Repo-Commit": "c" * 40, "Content-Length": str(len(body))}
        for name, value in (headers if here else {"X-Error-Code": found[1], "Content-Length": "0"}).items():
            self.send_header(name, value)
        self.end_headers()
        if here and self.command == "GET":
            self.wfile.write(body)

    do_GET = do_HEAD

    def log_message(self, *words):
        pass


@pytest.fixture(scope="module")
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def asked(cache, endpoint, *words):
    environment = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1",
                   "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1",
                   "no_proxy": "127.0.0.1"}  # fmt: skip
    command = [sys.executable, "-m", "llmlab", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, encoding="utf-8")


def test_a_config_is_fetched_when_it_is_asked_for(cache, hub):
    pytest.importorskip("huggingface_hub")
    done = asked(cache, hub, "models", "--download", NAME, "--json")
    assert done.returncode == 0, done.stderr
    (model,) = json.loads(done.stdout)
    assert (model["name"], model["layers"]) == (NAME, 7)
    assert lab.model(NAME).layers == 7


@pytest.mark.parametrize(("name", "words"), [
    ("some-lab/nothing", "no model some-lab/nothing"), ("some-lab/empty", "has no config.json on the Hub"),
    ("some-lab/gated", "is gated"), ("no name/../at all", "ORGANISATION/MODEL"),
])  # fmt: skip
def test_what_cannot_be_fetched_is_a_sentence(cache, hub, name, words):
    pytest.importorskip("huggingface_hub")
    done = asked(cache, hub, "models", "--download", name)
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("status", [None, 503])
def test_a_hub_that_does_not_answer(monkeypatch, status):
    """huggingface_hub tries several times, for half a minute, before it says so."""
    hub, errors = pytest.importorskip("huggingface_hub"), pytest.importorskip("huggingface_hub.errors")
    refused = errors.HfHubHTTPError("503 Service Unavailable", response=mock.Mock(headers={}))

    def download(name, file):
        why = refused if status else OSError("no route")
        raise errors.LocalEntryNotFoundError("not here") from why

    monkeypatch.setattr(hub, "hf_hub_download", download)
    words = "the Hub refused some-lab/Little-7B: 503" if status else r"does not answer \(OSError\)"
    with pytest.raises(lab.NotAvailable, match=words):
        hub_cache.download_config(NAME)
