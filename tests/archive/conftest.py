import pytest


@pytest.fixture(autouse=True)
def user_records(tmp_path_factory, monkeypatch):
    """The user's own folder of records, empty, so that no test sees or writes what somebody measured."""
    folder = tmp_path_factory.mktemp("user-records")
    monkeypatch.setenv("LLMLAB_RECORDS", str(folder))
    return folder
