"""Shares in proportion to the speed of the workers: `--rank-weights auto`."""

from __future__ import annotations

from dataclasses import replace

from hvdtrain.config import TrainConfig
from hvdtrain.exchange import Exchange, run_on_all
from hvdtrain.log import say
from hvdtrain.run.prepare import prepare
from hvdtrain.run.tasks import TaskData, share_out
from hvdtrain.topology import Topology
from hvdtrain.train.balance import measure_weights


def balance(
    config: TrainConfig,
    source: TaskData,
    global_batch_size: int,
    exchange: Exchange,
    topology: Topology,
    before: str | None,
) -> tuple[TrainConfig, TaskData]:
    """Collective: return the configuration with weights of the ranks, and the shares that follow.

    `before`: the weights with which the run was started, kept for the same number of ranks: they
    decide which rank computes what. Without them the speeds are measured.
    """
    weights = before
    if before is None or len(before.split(",")) != exchange.size:
        weights = None
        if exchange.size > 1:
            job = run_on_all(
                exchange,
                "balance",
                lambda: prepare(config, global_batch_size, source, exchange, topology),
            )
            weights = ",".join(map(str, measure_weights(job, exchange)))
    if exchange.rank == 0 and weights:
        say(f"rank weights: {weights} ({'as before' if weights == before else 'measured'})")
    config = replace(config, batch=replace(config.batch, rank_weights=weights))
    shares = share_out(config, exchange.size)
    return config, replace(source, shares=shares, valid_shares=shares)
