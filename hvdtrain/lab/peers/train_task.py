"""Train with `hvdtrain launch -np 2 -- train --task hvdtrain.lab.peers.train_task:PeerTask`."""

from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset, TensorDataset

from hvdtrain import Settings, Splits, Sums, Task, TensorSplit, split_of
from hvdtrain.lab.peers.same_work import read_work


class PeerTask(Task):
    """The work of all peers; `--data-dir` is its folder."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.work = read_work(settings.data_dir)

    def build_data(self) -> Splits:
        data: Any = self.work.make_data()
        if isinstance(data, TensorDataset):
            x, y = data.tensors
            some = self.work.batch_size
            return Splits("peers", TensorSplit(x, y), TensorSplit(x[:some], y[:some]))
        train = split_of(DataLoader(data, num_workers=self.work.readers))
        return Splits("peers", train, split_of(Subset(data, range(self.work.batch_size))))

    def build_model(self) -> torch.nn.Module:
        return self.work.make_model()

    def loss(self, model: torch.nn.Module, batch: Any) -> Sums:
        x, y = batch
        return Sums.of_means(cross_entropy(model(x), y), len(y))
