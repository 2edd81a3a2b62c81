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
    names = {
        "on the second network": [["10.88.0.1 alpha", "10.88.0.2 beta"]] * 2,
        "127.0.1.1": [["127.0.1.1 alpha"], ["127.0.1.1 beta"]],
        "none": [[], []],  # of what is the host's name on both
    }
    hashes = set()
    for number, (kind, each) in enumerate(names.items()):
        for host, lines in enumerate(each):
            cluster.name_hosts(host, lines)
            if not lines:
                cluster.set_hostname(host, "worker")
        for controller in CONTROLLERS:
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
