"""The network that a job uses, whatever the hosts' own names resolve to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.namespaces import Cluster
from tests.parallel.launching import CONTROLLERS, hvdtrain

EXPERIMENT = ["--model=mlp", "--data=digits", "--max-steps=4", "--experiment=run"]
GRADIENT_BYTES = 4 * (64 * 2048 + 2048 * 2048 + 2048 * 10 + 2 * 2048 + 10)


@pytest.mark.timeout(600)
def test_gradients_go_over_the_chosen_interface(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    """Fails if gradients go over another interface than --network-interface, since the hosts' own
    names resolve to an address on that one; or if one of the usual names breaks the job: Debian's
    127.0.1.1, none at all, or a name that two hosts have.
    """
    cluster = make_cluster([1, 1])
    second = cluster.add_network()
    addresses = [host.address for host in cluster.hosts]
    second_names = [["10.88.0.1 alpha", "10.88.0.2 beta"]] * 2
    names = [
        ("on the second network", CONTROLLERS, second_names),
        ("127.0.1.1", ["gloo"], [["127.0.1.1 alpha"], ["127.0.1.1 beta"]]),
        ("none", ["gloo"], [[], []]),  # of what is the host's name on both
    ]
    hashes = set()
    for number, (kind, controllers, each) in enumerate(names):
        for host, lines in enumerate(each):
            cluster.name_hosts(host, lines)
            if not lines:
                cluster.set_hostname(host, "worker")
        for controller in controllers:
            before = [cluster.bytes_of(1, it) for it in ("eth0", second)]
            folder = tmp_path / f"{number}-{controller}"
            command = hvdtrain(
                *("launch", "-H", ",".join(f"{it}:1" for it in addresses)),
                *(f"--controller={controller}", "--network-interface=eth0", "--"),
                *("train", *EXPERIMENT, f"--output={folder}"),
            )
            done = cluster.run(command, timeout_s=240)
            assert done.exit_code == 0, f"{kind}, {controller}: {done.output}"
            chosen, other = (
                cluster.bytes_of(1, it) - was
                for it, was in zip(("eth0", second), before, strict=True)
            )
            # Of two ranks each sends, and receives, all of a gradient in each step.
            assert chosen > 2 * 4 * GRADIENT_BYTES, (kind, controller, chosen)
            assert other < GRADIENT_BYTES / 100, (kind, controller, other)
            summary = json.loads((folder / "run" / "summary.json").read_text())
            hashes.add(summary["params_sha256"])
    assert len(hashes) == 1


TORCH = """\
import datetime, os, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
total = torch.ones(1) * (1 + dist.get_rank())
dist.all_reduce(total)
print("interface", os.environ["GLOO_SOCKET_IFNAME"], "total", total.item())
dist.destroy_process_group()
"""


@pytest.mark.timeout(600)
def test_interfaces_of_other_names(make_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """Fails if hosts need a common name of the interface that joins them, or are joined by the one
    that has it by chance; if a script with torch.distributed finds its peers only where hosts know
    their own names; if the doctor refuses such hosts; or if it is not said that large packets are
    lost on the way.
    """
    cluster = make_cluster([1, 1])
    second = cluster.add_network()
    for old, new in (("eth0", "old"), (second, "eth0"), ("old", second)):  # exchanged on one host
        cluster.ip(1, "link", "set", old, "down")
        cluster.ip(1, "link", "set", old, "name", new)
        cluster.ip(1, "link", "set", new, "up")
    for host in (0, 1):
        cluster.set_hostname(host, f"unknown-{host}")
    hosts = ",".join(f"{host.address}:1" for host in cluster.hosts)
    (tmp_path / "sums.py").write_text(TORCH)
    hashes = set()
    for controller in CONTROLLERS:
        start = hvdtrain("launch", "-H", hosts, f"--controller={controller}", "--")
        before = cluster.bytes_of(1, second)
        done = cluster.run([*start, "train", *EXPERIMENT, f"--output={tmp_path / controller}"], 240)
        assert done.exit_code == 0, f"{controller}: {done.output}"
        assert cluster.bytes_of(1, second) - before > 2 * 4 * GRADIENT_BYTES, controller
        summary = json.loads((tmp_path / controller / "run" / "summary.json").read_text())
        hashes.add(summary["params_sha256"])
        done = cluster.run([*start, "python", "sums.py"], 240, cwd=tmp_path)
        assert done.exit_code == 0, f"{controller}: {done.output}"
        for interface in ("eth0", second):
            assert f"interface {interface} total 3.0" in done.output, (controller, done.output)
    assert len(hashes) == 1
    done = cluster.run(hvdtrain("doctor", "-H", hosts), 240)
    assert done.exit_code == 0, done.output
    cluster.lose_large_packets(1, most_bytes=700)
    done = cluster.run([*start, "train", *EXPERIMENT, f"--output={tmp_path / 'lost'}"], 240)
    assert done.exit_code == 3, done.output
    assert "10.77.0.2: network: small packets arrive, large ones are lost" in done.output
