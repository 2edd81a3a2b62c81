"""The address by which the other workers reach this host."""

from __future__ import annotations

import pytest

from hvdtrain.errors import PreflightError
from hvdtrain.exchange.connect import own_address
from hvdtrain.network import (
    OF_GLOO,
    OF_NCCL,
    OF_OPEN_MPI,
    OF_TORCH,
    TOWARDS,
    address_of,
    interface_of,
    interfaces,
    own_interfaces,
    route_to,
)

LOOPBACK = "127.0.0.1"


@pytest.mark.parametrize(
    "environment",
    [
        {"HOROVOD_GLOO_IFACE": "lo", "OMPI_MCA_btl_tcp_if_include": "eth9"},
        {"OMPI_MCA_btl_tcp_if_include": "lo"},
        {"OMPI_MCA_btl_tcp_if_include": "10.0.0.0/8,eth9,lo"},
        {"NCCL_SOCKET_IFNAME": "lo", "OMPI_MCA_orte_hnp_uri": "1.0;tcp://192.0.2.1:5"},
        {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://127.0.0.1,192.0.2.1:53793;tcp6://[fd00::2]:55759"},
    ],
)
def test_what_the_launcher_has_chosen(environment: dict[str, str]) -> None:
    """Fails if a launcher's interface is passed over, or one that is not here ends the search."""
    assert own_address(environment) == LOOPBACK


def test_every_interface_has_its_own_address() -> None:
    """Fails if the address is another interface's."""
    found = interfaces()
    assert found
    assert address_of("eth99") is None and interface_of("192.0.2.7") is None
    for name, _ in found:
        assert (name, address_of(name)) in found


def test_the_route_to_this_host_itself() -> None:
    """Fails if the address is not the one that a connection would come from."""
    for _, address in interfaces():
        assert route_to(address) == address


@pytest.mark.parametrize("environment", [{}, {"HOROVOD_GLOO_IFACE": "eth9"}])
def test_no_interface(environment: dict[str, str]) -> None:
    """Fails if nothing, or an address that nobody can reach, is returned instead of an error."""
    with pytest.raises(PreflightError, match=r"none of HOROVOD_GLOO_IFACE, .* set NCCL_SOCKET"):
        own_address(environment)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, {}),
        ({OF_GLOO: "eth7"}, {OF_GLOO: "eth7", OF_TORCH: "eth7"}),
        ({OF_OPEN_MPI: "eth7", OF_NCCL: "eth7"}, dict.fromkeys((OF_OPEN_MPI, OF_NCCL), "eth7")),
        (
            {OF_GLOO: "eth7", OF_NCCL: "eth7", TOWARDS: LOOPBACK},
            dict.fromkeys((OF_GLOO, OF_NCCL), "lo"),
        ),
        ({OF_OPEN_MPI: "eth7", TOWARDS: LOOPBACK}, {OF_OPEN_MPI: "lo"}),
        ({OF_GLOO: "eth7", TOWARDS: "no address"}, {OF_GLOO: "eth7"}),
    ],
)
def test_own_interfaces(environment: dict[str, str], expected: dict[str, str]) -> None:
    """Fails if a worker keeps the name of another host's interface, or is given a variable of
    another library than those that the launcher has set.
    """
    torch = dict.fromkeys((OF_TORCH,) if expected else (), next(iter(expected.values()), ""))
    assert own_interfaces(environment) == expected | torch
