"""Image classification: cross-entropy, top-1 and top-5 accuracy, and confusions."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch.nn import functional

from hvdtrain.data.mixing import Mixed
from hvdtrain.data.splits import Batch, Dataset, Splits
from hvdtrain.errors import TrainingError
from hvdtrain.tasks import Settings, Sums, Task

TOP_K = 5
MOST_IN_MATRIX = 200  # classes; of more, only the pairs that occur are counted
MOST_SCORES = 1 << 22  # that are evaluated at a time, in float64: limits memory


class Classification(Task):
    """The default task of `hvdtrain train`."""

    metrics = ("accuracy",)
    best = "accuracy"
    best_is_highest = True

    def __init__(
        self,
        settings: Settings,
        dataset: Dataset,
        build: Callable[[], torch.nn.Module],
        label_smoothing: float = 0.0,
    ) -> None:
        """`build`: returns a network for the shape and classes of `dataset`. `label_smoothing`: the
        part of each label that is spread over all classes in training (Szegedy et al.,
        arXiv:1512.00567, section 7).
        """
        super().__init__(settings)
        self.dataset = dataset
        self._build, self._label_smoothing = build, label_smoothing
        top = ("accuracy_top5",) if dataset.classes > TOP_K else ()  # otherwise always 1
        self.valid_metrics: tuple[str, ...] = ("accuracy", *top)
        self.tables = {"confusion": (dataset.classes, dataset.classes)}

    def build_data(self) -> Splits:
        data = self.dataset
        shape = "x".join(map(str, data.shape)) + (f", {data.note}" if data.note else "")
        return Splits(data.name, data.train, data.valid, f"{data.classes} classes, {shape}")

    def build_model(self) -> torch.nn.Module:
        return self._build()

    def loss(self, model: torch.nn.Module, batch: Batch | Mixed) -> Sums:
        """Return the sums of a batch; of mixed samples, the label of the larger share is right."""
        inputs, labels = batch[:2]
        scores = self._scores(model, inputs)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if isinstance(batch, Mixed):
            losses, shares = self._losses(scores, labels), batch.shares.to(scores.dtype)
            partner_losses = self._losses(scores, batch.partner_labels)
            loss = (losses * shares + partner_losses * (1 - shares)).sum()
            labels = torch.where(batch.shares >= 0.5, labels, batch.partner_labels)
        else:
            loss = self._losses(scores, labels, "sum")
        right = (scores.detach().argmax(dim=1) == labels).sum()
        return Sums(loss, len(labels), {"accuracy": right})

    def _losses(
        self, scores: torch.Tensor, labels: torch.Tensor, reduction: str = "none"
    ) -> torch.Tensor:
        return functional.cross_entropy(
            scores, labels, reduction=reduction, label_smoothing=self._label_smoothing
        )

    def evaluate(self, model: torch.nn.Module, batch: Batch | Mixed) -> Sums:
        """Return the sums of a batch; `confusion` counts pairs [true class][predicted class].

        Validation samples are not mixed; mixed ones, with which a model is tried before the run,
        count by their own labels.
        """
        inputs, labels = batch[:2]
        scores, classes = self._scores(model, inputs), self.dataset.classes
        losses, predictions, samples = [], [], max(1, MOST_SCORES // classes)
        for part, part_labels in zip(scores.split(samples), labels.split(samples), strict=True):
            exact = part.double()
            losses.append(functional.cross_entropy(exact, part_labels, reduction="sum"))
            predictions.append(exact.topk(min(TOP_K, classes), dim=1).indices)
        best = torch.cat(predictions)
        right = best == labels[:, None]
        figures = {"accuracy": right[:, 0].sum(), "confusion": self._pairs(labels, best[:, 0])}
        if "accuracy_top5" in self.valid_metrics:
            figures["accuracy_top5"] = right.any(dim=1).sum()
        return Sums(torch.stack(losses).sum(), len(labels), figures)

    def _pairs(self, labels: torch.Tensor, predicted: torch.Tensor) -> torch.Tensor:
        """Return the counts of pairs, as a sparse tensor if there are many classes."""
        classes = self.dataset.classes
        if classes > MOST_IN_MATRIX:
            pairs, ones = torch.stack([labels, predicted]), torch.ones_like(labels)
            return torch.sparse_coo_tensor(pairs, ones, (classes, classes), check_invariants=True)
        counts = torch.bincount(labels * classes + predicted, minlength=classes * classes)
        return counts.reshape(classes, classes)

    def _scores(self, model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        scores = model(inputs)
        expected, shape = [len(inputs), self.dataset.classes], list(getattr(scores, "shape", ()))
        if not isinstance(scores, torch.Tensor) or shape != expected:
            raise TrainingError(
                f"--model={self.settings.model}: returned {type(scores).__name__} of shape {shape} "
                f"for inputs of shape {list(inputs.shape)}, expected scores of shape {expected} "
                "(samples, classes)"
            )
        return scores

    def takeaway(self) -> dict[str, Any]:
        """Return what is needed to rebuild the network and to read images as in training."""
        data = self.dataset
        return {
            "task": "classification",
            "model": self.settings.model,
            "data": self.settings.data,
            "dtype": str(self.settings.dtype).removeprefix("torch."),
            "shape": list(data.shape),
            "classes": list(data.class_names),
            "images": asdict(data.images) if data.images else None,
        }
