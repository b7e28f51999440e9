"""What is read of the networks of hosts, and which ranks are asked who speaks."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from nemo_fp8_debug.distributed.networks import NetworkAddresses, explain_unreachable, list_gloo_interfaces
from nemo_fp8_debug.distributed.peers import WarningElection


def network(host: int, gloo: str | None) -> NetworkAddresses:
    return NetworkAddresses(f"boot-{host}", f"host{host}", gloo, f"10.0.0.{host}")


@pytest.mark.parametrize(
    ("named", "found"),
    [("", []), ("eth0", ["eth0"]), ("eth0,eth1", ["eth0", "eth1"]), ("eth0,", ["eth0"]), ("e", [])],  # torch passes over "e"
)
def test_interfaces_are_those_that_torch_reads(monkeypatch: pytest.MonkeyPatch, named: str, found: list[str]) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)
    assert list_gloo_interfaces() == found


def test_an_interface_that_is_not_there_is_refused_as_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_fp8_debug.distributed.gloo import GlooGroup

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(RuntimeError, match="nowhere0"):
        GlooGroup(dist.HashStore(), 0, [0], 5.0)


def test_loopback_between_hosts_says_what_to_set() -> None:
    hosts = [network(1, "10.0.0.1"), network(1, "10.0.0.1"), network(2, "127.0.1.1")]
    assert explain_unreachable(hosts) == (
        "the name of host host2 (rank 2) resolves to 127.0.1.1, which other hosts cannot reach; "
        "set GLOO_SOCKET_IFNAME to the network interface between the hosts, on host2 that of 10.0.0.2"
    )


def test_loopback_on_one_host_and_named_interfaces_are_no_fault() -> None:
    assert explain_unreachable([network(1, "127.0.0.1"), network(1, "127.0.0.1")]) is None
    assert explain_unreachable([network(1, None), network(2, None)]) is None


def test_the_lowest_ranks_and_those_of_several_hosts_are_asked() -> None:
    assert WarningElection.choose_contact_ranks([network(rank // 8, None) for rank in range(10_000)]) == [
        *range(8),
        *range(8, 64, 8),
    ]
    assert WarningElection.choose_contact_ranks([network(0, None)]) == [0]
