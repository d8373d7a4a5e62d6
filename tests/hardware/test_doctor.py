"""The doctor's table."""

import json
import re

from llmlab.hardware.doctor import Doctor, chapter, doctor
from llmlab.hardware.scale import choose


def test_the_doctor_names_the_device_the_scale_and_each_chapter(no_gpu):
    checks = doctor()
    text, page = str(checks), checks._repr_html_()
    for part in (checks.host.name, checks.host.versions["torch"], checks.scale.reason, "chapter memory-anatomy"):
        assert part in text
        assert part in page
    assert "runs: at the scale cpu, fp32 on cpu" in text
    assert json.loads(json.dumps(checks.to_dict()))["scale"]["name"] == "cpu"


def test_the_doctor_tells_a_t4_what_it_lacks(cuda_host):
    here = cuda_host("T4")
    text = str(Doctor(here, choose(here), ()))
    assert re.search(r"^bf16 +no: use autocast-fp16$", text, re.M)
    assert re.search(r"^FlashAttention-2 +no", text, re.M)
    assert re.search(r"^in the GPU table +T4$", text, re.M)
    data = json.loads(json.dumps(Doctor(here, choose(here), ()).to_dict()))
    assert (data["host"]["gpu"], data["host"]["supports_bf16"]) == ("T4", False)


def test_a_chapter_that_cannot_run_says_what_it_needs(cuda_host):
    here = choose(cuda_host("T4"))
    needs = {"name": "launch", "packages": ["no-such-package"], "extra": "distributed", "scales": ["big"]}
    lacking = chapter(needs, here)
    assert (lacking.runs, lacking.note) == (False, "needs no-such-package; pip install 'llmlab[plot,distributed]'")
    assert "needs the scale big" in chapter({**needs, "packages": ["torch"]}, here).note
    assert chapter({**needs, "packages": ["torch"], "scales": ["t4", "big"]}, here).runs
