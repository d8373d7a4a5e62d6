"""Files that are kept in memory are found, renamed, copied and removed as those on the disk."""

import glob
import os
import shutil

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.usefixtures("no_gpu")


def test_a_checkpoint_is_renamed_copied_found_and_removed_where_it_is_kept(card, tmp_path):
    """Atomic saves, the best of several, and rotation, as scripts do them; the disk stays as it was."""
    model, last, best = nn.Linear(8, 8).cuda(), tmp_path / "last.pt", tmp_path / "best.pt"
    last.write_text("of an older run")
    with pytest.warns(UserWarning, match="is kept in memory"):
        torch.save(model.state_dict(), f"{last}.tmp")
    os.replace(f"{last}.tmp", last)
    shutil.copyfile(last, best)
    assert os.path.exists(best) and best.is_file() and not os.path.exists(f"{last}.tmp")
    assert f"{os.path.getsize(best) / 1e6:.1f} MB" == "? MB"
    assert torch.load(best)["weight"].is_cuda and torch.load(last, map_location="cpu")["bias"].shape == (8,)
    os.remove(best)
    assert not best.exists() and last.read_text() == "of an older run"
    step = tmp_path / "step-1"
    step.mkdir()
    with pytest.warns(UserWarning, match="is kept in memory"):
        torch.save(model, step / "model.pt")
    step.rename(tmp_path / "step-final")
    assert torch.load(tmp_path / "step-final" / "model.pt", weights_only=False).weight.is_cuda
    assert os.listdir(tmp_path / "step-final") == ["model.pt"]
    with pytest.raises(FileNotFoundError):
        os.lstat(tmp_path / "step-final" / "model.pt")  # the disk's own answer


@pytest.mark.filterwarnings("ignore:tensors on the simulated card:UserWarning")
def test_checkpoints_are_found_by_pattern_and_by_date(card, tmp_path):
    """How scripts resume from the latest and delete the oldest."""
    folder, model = tmp_path / "steps", nn.Linear(8, 8).cuda()
    (folder / "real").mkdir(parents=True)
    (folder / "log.txt").write_text("of before")
    for step in (2, 10, 1):
        torch.save(model.state_dict(), folder / f"{step}.pt")
    torch.save(model.state_dict(), folder / "deep" / "er.pt")
    torch.save(model.state_dict(), folder / "2.pt")  # again: now the latest
    files = glob.glob(f"{folder}/*.pt")
    assert sorted(map(os.path.basename, files)) == ["1.pt", "10.pt", "2.pt"]
    assert [each.name for each in sorted(folder.glob("*.pt"), key=os.path.getmtime)] == ["10.pt", "1.pt", "2.pt"]
    assert glob.glob(f"{folder}/1.pt") and not glob.glob(f"{folder}/3.pt")
    assert {each.name for each in folder.rglob("*.pt")} == {"1.pt", "10.pt", "2.pt", "er.pt"}
    walked = {os.path.relpath(top, folder): (sorted(folders), sorted(names)) for top, folders, names in os.walk(folder)}
    assert walked == {
        ".": (["deep", "real"], ["1.pt", "10.pt", "2.pt", "log.txt"]), "real": ([], []), "deep": ([], ["er.pt"]),
    }  # fmt: skip
