"""Files of a script: written to a folder of their own, found where the script put them, what was there untouched."""

# ruff: noqa: SIM115 - open() itself is what is tested
import os
import shutil
import socket
import tempfile
from pathlib import Path

import pytest

from llmlab.scripts.written_files import WrittenFiles


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with a file, a full and an empty folder, as the working directory; `kept` beside it."""
    home = tmp_path / "home"
    (home / "data").mkdir(parents=True)
    (home / "empty").mkdir()
    (home / "data" / "train.txt").write_text("as it was")
    monkeypatch.chdir(home)
    return home


@pytest.fixture
def kept(tmp_path):
    return tmp_path / "kept"


def state(folder):
    return {str(path.relative_to(folder)): path.read_text() if path.is_file() else None for path in folder.rglob("*")}


def test_what_is_written_is_found_and_nothing_before_it_changes(home, kept):
    before = state(home)
    with WrittenFiles(str(kept)).patched():
        os.makedirs("out/deep")
        with open("out/deep/log.txt", "a") as file:
            file.write("one")
        with Path("out/deep/log.txt").open("a") as file:
            file.write(" two")
        Path("data/train.txt").write_text("other")
        assert open("out/deep/log.txt").read() == "one two"
        assert Path("data/train.txt").read_text() == "other"
        assert sorted(os.listdir(".")) == ["data", "empty", "out"]
        assert {entry.name for entry in os.scandir("out")} == {"deep"}
        assert sorted(str(path) for path in Path(".").rglob("*.txt")) == ["data/train.txt", "out/deep/log.txt"]
        assert os.path.isdir("out/deep") and os.path.getsize("out/deep/log.txt") == 7
    assert state(home) == before
    assert (kept / str(home)[1:] / "out/deep/log.txt").read_text() == "one two"


def test_appending_goes_on_from_what_was_there(home, kept):
    with WrittenFiles(str(kept)).patched():
        with open("data/train.txt", "a") as file:
            file.write(", and more")
        assert open("data/train.txt").read() == "as it was, and more"
    assert (home / "data/train.txt").read_text() == "as it was"


def test_removing_renaming_and_copying(home, kept):
    before = state(home)
    with WrittenFiles(str(kept)).patched():
        os.replace("data/train.txt", "data/moved.txt")
        assert not os.path.exists("data/train.txt") and open("data/moved.txt").read() == "as it was"
        shutil.copy2("data/moved.txt", "copy.txt")
        os.remove("data/moved.txt")
        assert os.listdir("data") == []
        shutil.rmtree("data")
        assert not os.path.exists("data")
        os.rmdir("empty")
        assert os.listdir(".") == ["copy.txt"]
        os.mkdir("data")
        assert os.listdir("data") == []
        shutil.move("copy.txt", "data")
        os.symlink("copy.txt", "data/latest")
        assert open("data/latest").read() == "as it was"
    assert state(home) == before


def test_a_tokenizer_that_is_saved_is_found_although_compiled_code_writes_it(home, kept):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    before = state(home)
    with WrittenFiles(str(kept)).patched():
        transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained("out/checkpoint-2")
        assert "tokenizer.json" in os.listdir("out/checkpoint-2")
        file = f"{kept}{home}/out/checkpoint-2/tokenizer.json"
        again = transformers.PreTrainedTokenizerFast(tokenizer_file=file)
        assert again("b a b")["input_ids"] == [1, 0, 1]
    assert state(home) == before


def test_a_socket_can_be_made_in_the_temporary_folder_by_a_script_in_it(home, kept):
    """As multiprocessing's managers do, and with them datasets' map(num_proc=)."""
    with WrittenFiles(str(kept)).patched():
        folder = tempfile.mkdtemp()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.path.join(folder, "listener"))
        shutil.rmtree(folder)
    assert not kept.exists()


def test_errors_are_those_of_the_system(home, kept):
    with WrittenFiles(str(kept)).patched():
        for wrong, call in (
            (FileNotFoundError, lambda: open("nowhere/file", "w")),
            (FileNotFoundError, lambda: open("nowhere.txt")),
            (FileNotFoundError, lambda: open("nowhere.txt", "r+")),
            (FileNotFoundError, lambda: os.remove("nowhere.txt")),
            (FileNotFoundError, lambda: os.listdir("nowhere")),
            (FileExistsError, lambda: open("data/train.txt", "x")),
            (FileExistsError, lambda: os.mkdir("data")),
            (OSError, lambda: os.rmdir("data")),
            (IsADirectoryError, lambda: open("data", "w")),
        ):
            with pytest.raises(wrong):
                call()
        assert not os.access("nowhere", os.R_OK)


def test_the_functions_of_os_are_its_own_again_after_the_block(home, kept):
    names = ("open", "mkdir", "listdir", "stat", "remove", "rename", "scandir")
    before = [getattr(os, name) for name in names]
    with pytest.raises(KeyError), WrittenFiles(str(kept)).patched():
        raise KeyError
    assert [getattr(os, name) for name in names] == before


def test_the_mode_of_what_the_run_wrote_changes_and_of_what_was_there_does_not(home, kept):
    before = (home / "data/train.txt").stat().st_mode
    with WrittenFiles(str(kept)).patched():
        Path("run.sh").write_text("true")
        os.chmod("run.sh", 0o700)
        os.chmod("data/train.txt", 0o600)
    assert (kept / str(home)[1:] / "run.sh").stat().st_mode & 0o777 == 0o700
    assert (home / "data/train.txt").stat().st_mode == before and not (home / "run.sh").exists()
