"""The task of a configuration and its data, on this rank and over all hosts."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch

from hvdtrain.cgroups import usable_cores
from hvdtrain.config import BatchConfig, TrainConfig, plugins
from hvdtrain.data import (
    GlobalBatchSampler,
    PlacedShares,
    ReadOptions,
    Shares,
    SharesLike,
    VirtualShares,
    load_dataset,
)
from hvdtrain.data.builtin import fetch
from hvdtrain.data.feeding import PartSplit, evaluation_batch, in_order
from hvdtrain.data.loader_order import DrawnBatchSampler, LoaderOrder
from hvdtrain.data.mixing import mixed
from hvdtrain.data.sketch import SKETCH, sketch_of
from hvdtrain.data.splits import Fingerprint, Split, Splits, check_split, fingerprint, is_endless
from hvdtrain.errors import UsageError, refuse
from hvdtrain.exchange import Exchange
from hvdtrain.exchange.agreement import run_on_all
from hvdtrain.log import counted
from hvdtrain.models import IMAGE_SIZES, check_model, fit_dataset
from hvdtrain.models import build_model as build_network
from hvdtrain.run.same_data import refuse_other_data
from hvdtrain.run.script import Script
from hvdtrain.tasks import Settings, Task
from hvdtrain.tasks.classification import Classification

DTYPES = {"float32": torch.float32, "float64": torch.float64}
MOST_READERS = 8  # processes per worker that prefetch samples

Fingerprints = dict[str, Fingerprint]  # of `train` and `valid`


@dataclass(frozen=True)
class TaskData:
    """A task, its data over all hosts, and the distribution of samples over ranks."""

    task: Task
    data: Splits
    parts: tuple[int, ...]  # training samples on each host; () if every host has all
    shares: SharesLike
    valid_shares: SharesLike
    fingerprints: list[Fingerprints]  # one, or with parts one per host

    def sampler(self, global_batch_size: int, seed: int, batch: BatchConfig) -> GlobalBatchSampler:
        """Return the sampler of the training samples. Raises UsageError if the batch exceeds them.

        `batch`: the flags that determine `global_batch_size`.
        """
        if order := getattr(self.data.train, "order", None):
            return self._drawn(order, global_batch_size, seed, batch)
        samples = len(self.data.train)
        if global_batch_size > samples:
            text = f"--global-batch-size={global_batch_size}"
            if batch.batch_size is not None:
                kind = "virtual worker" if isinstance(self.shares, VirtualShares) else "worker"
                workers = counted(len(self.shares.weights), kind)
                text = f"--batch-size={batch.batch_size}: on {workers} that is {global_batch_size}"
            elif batch.global_batch_size is None:
                text += " (the default)"
            raise UsageError(
                f"{text}: {self.data.name} has only {counted(samples, 'sample')} to train on. "
                f"Give --global-batch-size {samples} or less"
            )
        return GlobalBatchSampler(
            samples, global_batch_size, seed, self.parts, shuffle=not in_order(self.data.train)
        )

    def _drawn(
        self, order: LoaderOrder, global_batch_size: int, seed: int, batch: BatchConfig
    ) -> DrawnBatchSampler:
        """Return the sampler that draws as a DataLoader's own. Raises UsageError."""
        if self.parts:
            raise UsageError(
                f"--data-placement=per-host: the {order.name} of the DataLoader chooses from all "
                "samples, and each host has a part of them"
            )
        sampler = DrawnBatchSampler(order, global_batch_size, seed)
        sizes = {batch.global_batch_size, batch.batch_size} - {None, sampler.global_batch_size}
        if order.yields_batches and sizes:
            raise UsageError(
                f"--global-batch-size or --batch-size is {sizes.pop()}: the batches of the "
                f"{order.name} are the global batches (up to {sampler.global_batch_size} samples). "
                "Leave the flag out"
            )
        return sampler


def valid_batch(split: Split, batch: BatchConfig, global_batch_size: int) -> int:
    """Return the number of samples of the validation data to evaluate at a time on one rank."""
    pass_samples = -(-global_batch_size // batch.grad_accum_steps)
    return evaluation_batch(split, batch.eval_batch_size, pass_samples)


def chosen_by(config: TrainConfig, kind: str) -> tuple[str, str]:
    """Return the flag, with its value, that has chosen the `kind`, data or model."""
    if config.model.task is not None:
        return "--task", config.model.task
    return f"--{kind}", config.data.data if kind == "data" else config.model.model


def find_source(
    config: TrainConfig, exchange: Exchange, local_rank: int, script: Script | None = None
) -> TaskData:
    """Collective: build the task and read its data on every rank, and compare the ranks' results.

    `script`: has a task and data of its own.

    Raises AgreedFailure if a rank fails, has other data than the others, or hosts hold parts of
    different data sets.
    """
    hosts = hosts_of(exchange.all_gather_object(local_rank, "hvdtrain.local_ranks"))
    host = hosts[exchange.rank]
    if script is None and config.model.task is None:
        folder = Path(_of_host(config.data.data_dir, host, config))
        run_on_all(
            exchange,
            "download",
            lambda: fetch(config.data.data, folder) if local_rank == 0 else None,
        )
    shared = config.data.data_placement == "shared"

    def build() -> tuple[Task, Splits, Fingerprints]:
        task: Task = script.task if script else build_task(config, host, hosts.count(host))
        data = script.data if script else build_data(task, config)
        if not shared and (in_order(data.train) or in_order(data.valid)):
            raise UsageError(
                "--data-placement=per-host: samples that are read in order, as those of "
                "hvdtrain.IterableSplit, cannot be parts of several hosts"
            )
        refuse(config.schedule.problems_without_epochs() if is_endless(data.train) else ())
        return task, data, _fingerprints(data, config, script)

    task, data, fingerprints = run_on_all(exchange, "data", build)
    if not shared:
        source = _place(task, data, fingerprints, hosts, config.batch, exchange)
        refuse_other_data(exchange, data, fingerprints, hosts)
        return source
    refuse_other_data(exchange, data, fingerprints, [0] * exchange.size)
    shares = share_out(config, exchange.size)
    return TaskData(task, data, (), shares, shares, [fingerprints])


def share_out(config: TrainConfig, workers: int) -> SharesLike:
    """Return the shares of samples that every host has."""
    shares, virtual = Shares(workers, config.batch.weights(workers)), config.batch.virtual_workers
    return shares if virtual is None else VirtualShares(Shares(virtual), shares.sizes(virtual))


def _fingerprints(data: Splits, config: TrainConfig, script: Script | None) -> Fingerprints:
    flag, name = chosen_by(config, "data")
    parts = {"train": data.train, "valid": data.valid}
    fingerprints = {
        part: plugins.call(flag, name, partial(fingerprint, split)) for part, split in parts.items()
    }
    if script or config.model.task or plugins.is_plugin(config.data.data):
        for part, split in parts.items():
            fingerprints[part][SKETCH] = sketch_of(split)
    return fingerprints


def hosts_of(local_ranks: Sequence[int]) -> list[int]:
    """Return the number of each rank's host, from 0: each host begins with its local rank 0."""
    return [number - 1 for number in accumulate(int(rank == 0) for rank in local_ranks)]


def _place(
    task: Task,
    data: Splits,
    fingerprints: Fingerprints,
    hosts: list[int],
    batch: BatchConfig,
    exchange: Exchange,
) -> TaskData:
    """Collective: return the parts of all hosts as one data set."""
    weights, virtual = batch.weights(exchange.size), batch.virtual_workers
    local_part = (task.takeaway().get("classes"), len(data.train), len(data.valid))
    all_parts = exchange.all_gather_object(local_part, "hvdtrain.parts")
    all_fingerprints = exchange.all_gather_object(fingerprints, "hvdtrain.fingerprints")
    firsts = [hosts.index(host) for host in range(hosts[-1] + 1)]
    run_on_all(
        exchange, "parts", lambda: _refuse_other_parts(all_parts, hosts, firsts, weights, virtual)
    )
    _, train, valid = zip(*(all_parts[rank] for rank in firsts), strict=True)
    host = hosts[exchange.rank]
    whole = replace(
        data,
        train=PartSplit(data.train, sum(train[:host]), sum(train)),
        valid=PartSplit(data.valid, sum(valid[:host]), sum(valid)),
        note=f"{data.note}; parts of {' + '.join(map(str, train))} samples on {len(train)} hosts",
    )
    return TaskData(
        task,
        whole,
        parts=train,
        shares=_placed_shares(train, hosts, weights, virtual),
        valid_shares=_placed_shares(valid, hosts, weights, virtual),
        fingerprints=[all_fingerprints[rank] for rank in firsts],
    )


def _placed_shares(
    lengths: Sequence[int], hosts: list[int], weights: Sequence[float], virtual: int | None
) -> SharesLike:
    """Return the shares of samples on single hosts. Virtual workers belong to one host each."""
    if virtual is None:
        return PlacedShares(lengths, hosts, weights)
    of_hosts = Shares(len(lengths)).sizes(virtual)
    host_of_worker = [host for host, count in enumerate(of_hosts) for _ in range(count)]
    counts: list[int] = []
    for host, count in enumerate(of_hosts):
        local = [weight for weight, other in zip(weights, hosts, strict=True) if other == host]
        counts += Shares(len(local), local).sizes(count)
    return VirtualShares(PlacedShares(lengths, host_of_worker, (1.0,) * virtual), counts)


def _refuse_other_parts(
    all_parts: list[tuple[list[str] | None, int, int]],
    hosts: list[int],
    firsts: list[int],
    weights: Sequence[float],
    virtual: int | None,
) -> None:
    """Raise UsageError if parts do not fit together, or no rank of a host takes its samples.
    `all_parts`: classes, training samples and validation samples by rank. `firsts`: rank by host.
    """
    problems = [
        f"--rank-weights={','.join(map(str, weights))}: all workers of host {host} have weight 0, "
        "and no other host has its samples"
        for host in range(len(firsts))
        if not any(weight for weight, other in zip(weights, hosts, strict=True) if other == host)
    ]
    if virtual is not None and virtual < len(firsts):
        problems.append(
            f"--virtual-workers={virtual}: with --data-placement=per-host each of the "
            f"{len(firsts)} hosts needs one for its samples: give at least {len(firsts)}"
        )
    for rank, (classes, train, valid) in enumerate(all_parts):
        first = all_parts[firsts[hosts[rank]]]
        if classes != all_parts[0][0]:
            ours, theirs = set(all_parts[0][0] or ()), set(classes or ())
            problems.append(
                f"--data-placement=per-host: rank {rank} on host {hosts[rank]} has other classes "
                f"than host 0: it lacks {sorted(ours - theirs)[:5]}, and also has "
                f"{sorted(theirs - ours)[:5]}. Make a folder for each class on each host"
            )
        elif (train, valid) != first[1:]:
            problems.append(
                f"--data-placement=per-host: rank {rank} on host {hosts[rank]} reads {train} and "
                f"{valid} samples, another rank of that host {first[1]} and {first[2]}"
            )
    refuse(problems)


def build_task(config: TrainConfig, host: int = 0, workers_here: int = 1) -> Task:
    """Return the task that `--task` names, or classification. Raises UsageError."""
    settings = Settings(
        model=config.model.model,
        data=_of_host(config.data.data, host, config),
        data_dir=Path(_of_host(config.data.data_dir, host, config)),
        seed=config.run.seed,
        dtype=DTYPES[config.model.dtype],
    )
    if config.model.task is None:
        return _classification(config, settings, workers_here)
    name = config.model.task
    made = plugins.call("--task", name, plugins.import_callable("--task", name), settings)
    if not isinstance(made, Task):
        raise UsageError(f"--task={name}: returned {type(made).__name__}, expected hvdtrain.Task")
    needed = ("build_data", "build_model", "loss")
    if lacking := [
        method for method in needed if getattr(type(made), method) is getattr(Task, method)
    ]:
        raise UsageError(
            f"--task={name}: {type(made).__name__} does not define {', '.join(lacking)} "
            "(see hvdtrain.Task)"
        )
    return made


def _of_host(path: str, host: int, config: TrainConfig) -> str:
    return path.replace("{host}", str(host)) if config.data.data_placement != "shared" else path


def _classification(config: TrainConfig, settings: Settings, workers_here: int) -> Task:
    chosen = config.data
    # Elsewhere only evaluate and predict run, and the process itself reads.
    cores = usable_cores() if sys.platform == "linux" else 0
    readers = min(cores // workers_here, MOST_READERS) if chosen.workers is None else chosen.workers
    options = ReadOptions(
        image_size=chosen.image_size or IMAGE_SIZES.get(settings.model),
        valid_split=chosen.valid_split,
        hflip=chosen.hflip,
        crop_padding=chosen.crop_padding,
        crop_scale=chosen.crop_scale,
        max_pixels=chosen.max_image_pixels,
        readers=readers,
        skip_bad=chosen.skip_bad_samples,
    )
    dataset = load_dataset(settings.data, settings.data_dir, settings.seed, settings.dtype, options)
    dataset = fit_dataset(dataset, settings.model)
    wanted = config.model.num_classes or dataset.classes
    if wanted < dataset.classes:
        raise UsageError(f"--num-classes={wanted}: {dataset.name} has {dataset.classes} classes")
    dataset = replace(dataset, classes=wanted)
    dataset = mixed(dataset, settings.seed, chosen.mixup, chosen.cutmix)
    build = partial(build_network, settings.model, dataset.shape, wanted, settings.dtype)
    return Classification(settings, dataset, build, config.model.label_smoothing)


def build_data(task: Task, config: TrainConfig) -> Splits:
    """Return the task's data. Raises UsageError unless it has the required types."""
    name = config.model.task
    if name is None:
        return task.build_data()
    data = plugins.call("--task", name, task.build_data)
    if not isinstance(data, Splits):
        raise UsageError(
            f"--task={name}: build_data returned {type(data).__name__}, expected hvdtrain.Splits"
        )
    for part, split in (("train", data.train), ("valid", data.valid)):
        check_split("--task", name, part, split)
    return data


def build_model(task: Task, config: TrainConfig) -> torch.nn.Module:
    """Return the task's network. Raises UsageError unless it is a torch.nn.Module."""
    name = config.model.task
    if name is None:
        return task.build_model()
    model = check_model("--task", name, plugins.call("--task", name, task.build_model))
    return model.to(DTYPES[config.model.dtype])
