"""Hosts of GPUs: their memory per GPU, and the links to it."""

from statistics import median

import pytest

import llmlab as lab
from llmlab.hardware.links import links
from llmlab.hardware.nodes import host, host_of, hosts, nvme, to_host, usual_host


@pytest.mark.parametrize("machine", hosts().values(), ids=lambda machine: machine.name)
def test_gpus_of_a_host_share_its_bandwidth_and_reach_it_over_pcie(machine):
    assert machine.source and "[" not in machine.source and machine.checked
    assert machine.share * machine.gpus == pytest.approx(machine.bandwidth)
    for name in machine.gpu_names:
        assert host_of(name) is usual_host(name) is machine
        device, reached = lab.gpu(name), to_host(name)
        assert 0.5 * device.pcie < reached < device.pcie
        assert 3e9 < to_host(name, pinned=False) < reached  # through a buffer of the driver


def test_each_generation_of_pcie_is_faster():
    reached = [to_host(name) for name in ("V100-32GB", "A100-80GB", "H100")]
    assert reached == sorted(reached) and reached[2] > 3 * reached[0]
    assert set(reached) <= {link.reached for link in links().values() if link.kind == "pcie"}


def test_a_gpu_that_no_host_has_gets_a_median_per_gpu():
    with pytest.raises(lab.NotAvailable, match="L40S"):
        host_of("L40S")
    usual = usual_host("L40S")
    assert usual.gpus == lab.gpu("L40S").node_gpus and not usual.source
    assert usual.share == pytest.approx(median(machine.share for machine in hosts().values()))
    per_gpu = [machine.memory / machine.gpus for machine in hosts().values()]
    assert usual.memory / usual.gpus == pytest.approx(median(per_gpu))


def test_an_unknown_host_names_the_nearest_and_a_gpu_without_pcie_is_refused():
    with pytest.raises(lab.UnknownName, match="DGX-A100"):
        host("dgx a100x")
    with pytest.raises(lab.NotAvailable, match="GB200"):
        to_host("GB200")


def test_drives_are_slower_than_the_link_to_memory():
    assert 0 < nvme().write < nvme().read < to_host("A100-80GB")
