"""Fixtures of test hosts; they skip the test, with the reason, where hosts cannot be made."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import pytest

from hvdtrain.lab.hosts.network import why_not
from tests.hosts.namespaces import Cluster

_why_not = functools.cache(why_not)


@pytest.fixture
def make_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Cluster]]:
    """Yield a factory of clusters for one test: make_cluster([1, 2, 1], ssh_port=2222).

    Fails the test if anything is left on a host at its end.
    """
    if reason := _why_not():
        pytest.skip(reason)
    made: list[Cluster] = []
    with ExitStack() as stack:

        def make(slots: Sequence[int] = (1, 2, 1), **options: object) -> Cluster:
            folder = tmp_path_factory.mktemp("cluster")
            visible = [tmp_path_factory.getbasetemp()]
            made.append(Cluster(slots, folder, visible=visible, **options))  # type: ignore[arg-type]
            return stack.enter_context(made[-1])

        yield make
        left = [line for cluster in made for line in cluster.leftovers()]
        assert not left, left


@pytest.fixture
def cluster(make_cluster: Callable[..., Cluster]) -> Cluster:
    """Return a cluster of three hosts, alpha, beta and gamma, with 1, 2 and 1 slots."""
    return make_cluster()
