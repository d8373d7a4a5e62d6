import pytest


@pytest.fixture(autouse=True)
def without_records(user_records):
    pass
