"""Model parallelism, for contrast: the layers are split over processes, and the batch is not.

Each process holds one stage. The whole batch passes through all stages forward, and its gradient
backward; one stage computes while the others wait. This allows larger networks, not faster steps.

Source: Y. Huang et al., "GPipe" (2019, arXiv:1811.06965), section 2, before micro-batches.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import fx, nn

from hvdtrain.errors import UsageError
from hvdtrain.lab.systems.contract import Member, Messages, Parameters, Spec, Strategy
from hvdtrain.lab.systems.work import DTYPES, GlobalBatch, Work, parameters_of, trained


class ModelParallel(Strategy):
    """The system `model_parallel`: one process per stage."""

    what = "the layers split over processes, the batch whole"

    def __init__(self, work: Work, member: Member) -> None:
        super().__init__(work, member)
        self.link = self._messages = Messages(member)
        stages = cut_into_stages(work.model, member.workers)
        self._dtype = DTYPES[work.spec.dtype]
        one_sample = torch.zeros((1, *work.dataset.shape), dtype=self._dtype)
        self._shapes = shapes_between(stages, one_sample)
        self._last = len(stages) - 1
        self._stage = stages[member.number] if member.number <= self._last else None
        if self._stage:
            self._optimizer = work.optimizer(trained(self._stage))

    @classmethod
    def processes(cls, spec: Spec) -> list[str]:
        return [f"stage {number}" for number in range(spec.workers)]

    def step(self, batch: GlobalBatch) -> None:
        """Collective: run this stage forward and backward, and update its parameters."""
        stage, number, clock = self._stage, self.member.number, self.work.clock
        if stage is None:
            clock.leave()
            return
        self._optimizer.zero_grad()
        total = len(batch.indices)
        inputs, labels = self.work.load(*batch) if number in (0, self._last) else (None, None)
        passed = inputs if number == 0 else self._receive(number - 1, total, number - 1)
        assert passed is not None
        clock.enter("compute")
        if number < self._last:
            result = stage(passed.requires_grad_(number > 0))
            clock.enter("exchange")
            self._messages.send(result.detach().contiguous(), number + 1)
            gradient = self._receive(number, total, number + 1)
            clock.enter("compute")
            result.backward(gradient)
        else:
            assert labels is not None
            self.work.add_gradient(stage, (passed.requires_grad_(number > 0), labels), total)
        if number > 0:
            clock.enter("exchange")
            assert passed.grad is not None
            self._messages.send(passed.grad.contiguous(), number - 1)
        self.work.update(self._optimizer)

    def _receive(self, passage: int, samples: int, source: int) -> torch.Tensor:
        """Receive what passes between stages `passage` and `passage + 1`, forward or backward."""
        self.work.clock.enter("exchange")
        values = torch.empty((samples, *self._shapes[passage]), dtype=self._dtype)
        self._messages.receive(values, source)
        return values

    def parameters(self) -> Parameters:
        """Collective: return the parameters of this stage."""
        return parameters_of(self._stage) if self._stage else {}

    def notes(self) -> list[str]:
        if self._stage is None:
            return [f"{self.name} has no layers: the network has {self._last + 1} stages"]
        names = [name.rpartition(".")[0] for name, _ in self._stage.named_parameters()]
        return [f"{self.name}: {', '.join(dict.fromkeys(names))}"]


def cut_into_stages(model: nn.Module, stages: int) -> list[fx.GraphModule]:
    """Split `model` into at most `stages` sequential networks; raise UsageError if it cannot be
    traced, or if two stages would share a parameter.

    The stages share their parameters with `model`, under the same names.
    """
    try:
        graph = fx.Tracer().trace(model)
    except Exception as error:  # user code may raise anything on a traced tensor
        raise UsageError(f"--model: model_parallel cannot trace it: {error}") from error
    nodes = [node for node in graph.nodes if node.op not in ("get_attr", "output")]
    has_parameters = [
        node.op == "call_module" and bool([*model.get_submodule(str(node.target)).parameters()])
        for node in nodes
    ]
    layers_before = [*itertools.accumulate(has_parameters, initial=0)]
    cuts = choose_cuts(layers_before, _single_passages(nodes), stages)
    edges = [1, *cuts, len(nodes)]  # nodes[0] is the input
    built = [
        _build(model, nodes[start - 1], nodes[start:stop])
        for start, stop in itertools.pairwise(edges)
    ]
    owned = [id(parameter) for stage in built for parameter in stage.parameters()]
    if len(set(owned)) < len(owned):
        raise UsageError("--model: model_parallel: two stages would share a parameter")
    return built


def choose_cuts(layers_before: Sequence[int], positions: Sequence[int], stages: int) -> list[int]:
    """Return the positions to cut at, ascending; fewer than `stages - 1` if there are no more.

    `layers_before[position]`: number of layers with parameters before that position.
    `positions`: those at which a cut is possible.
    """
    total, cuts = layers_before[-1], list[int]()
    for number in range(1, stages):
        done = layers_before[cuts[-1]] if cuts else 0
        candidates = [position for position in positions if done < layers_before[position] < total]
        if not candidates:
            break
        wanted = number * total / stages
        # The nearest; of those equally near, the latest, so that it follows pooling.
        cuts.append(min(candidates, key=lambda p: (abs(layers_before[p] - wanted), -p)))
    return cuts


def _single_passages(nodes: Sequence[fx.Node]) -> list[int]:
    """Return the positions across which only the result of the preceding node is still needed."""
    positions = {node: position for position, node in enumerate(nodes)}
    last_use = [
        max((positions.get(user, len(nodes)) for user in node.users), default=-1) for node in nodes
    ]
    return [
        position
        for position in range(1, len(nodes))
        if last_use[position - 1] >= position
        and all(used < position for used in last_use[: position - 1])
    ]


def _build(model: nn.Module, before: fx.Node, nodes: Sequence[fx.Node]) -> fx.GraphModule:
    """Build the network of `nodes`; its input is the result of `before`."""
    graph = fx.Graph()
    copies = {before: graph.placeholder("passed")}

    def find(node: fx.Node) -> fx.Node:
        if node not in copies:  # a get_attr node: a parameter that is used directly
            copies[node] = graph.node_copy(node, find)
        return copies[node]

    for node in nodes:
        find(node)
    graph.output(copies[nodes[-1]])
    return fx.GraphModule(model, graph)


def shapes_between(stages: Sequence[nn.Module], sample: torch.Tensor) -> list[torch.Size]:
    """Return the shape, without the batch, between successive stages; `sample`: a batch of one."""
    shapes, value = [], sample
    with torch.no_grad():
        for stage in stages[:-1]:
            value = stage.eval()(value)  # leaves running statistics as they are
            stage.train()
            shapes.append(value.shape[1:])
    return shapes
