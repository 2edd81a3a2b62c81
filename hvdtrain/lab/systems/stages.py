"""Cuts a network into stages, each a network of its own, where one tensor alone passes.

The network is traced (torch.fx) into its operations, one after the other. Between two of them it
may be cut where a single result is still to be used. Stages get almost equally many layers with
parameters; among equal places the latest is taken, as pooling makes what passes smaller.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import fx, nn

from hvdtrain.errors import UsageError


def cut_into_stages(model: nn.Module, stages: int) -> list[fx.GraphModule]:
    """At most `stages` networks that, one after the other, are `model`; parameters are shared
    with it and keep their names. Raises UsageError for a network that cannot be traced.
    """
    try:
        graph = fx.Tracer().trace(model)
    except Exception as error:  # whatever the network's own code makes of a traced tensor
        raise UsageError(f"--model: model_parallel cannot trace it: {error}") from error
    nodes = [node for node in graph.nodes if node.op not in ("get_attr", "output")]
    cuts = choose_cuts(_layers_before(model, nodes), _single_passages(graph, nodes), stages)
    edges = [1, *cuts, len(nodes)]  # nodes[0] is the input
    built = [
        _build(model, nodes[start - 1], nodes[start:stop])
        for start, stop in itertools.pairwise(edges)
    ]
    _refuse_shared(built)
    return built


def choose_cuts(layers_before: Sequence[int], places: Sequence[int], stages: int) -> list[int]:
    """Positions, rising, at which to cut; fewer than `stages - 1` where there are no more.

    `layers_before[position]`: layers with parameters before it; `places`: where it may be cut.
    """
    total, cuts = layers_before[-1], list[int]()
    for number in range(1, stages):
        done = layers_before[cuts[-1]] if cuts else 0
        open_places = [place for place in places if done < layers_before[place] < total]
        if not open_places:
            break
        wanted = number * total / stages
        best = min(abs(layers_before[place] - wanted) for place in open_places)
        cuts.append(
            max(place for place in open_places if abs(layers_before[place] - wanted) == best)
        )
    return cuts


def _layers_before(model: nn.Module, nodes: Sequence[fx.Node]) -> list[int]:
    """For each position in `nodes`, and for their end, how many have parameters before it."""
    counts = [0]
    for node in nodes:
        has_parameters = node.op == "call_module" and any(
            True for _ in model.get_submodule(str(node.target)).parameters()
        )
        counts.append(counts[-1] + has_parameters)
    return counts


def _single_passages(graph: fx.Graph, nodes: Sequence[fx.Node]) -> list[int]:
    """Positions before which exactly one result, the last one, is still to be used."""
    places = {node: position for position, node in enumerate(nodes)}
    last_use = [
        max((places.get(user, len(nodes)) for user in node.users), default=-1) for node in nodes
    ]
    return [
        position
        for position in range(1, len(nodes))
        if last_use[position - 1] >= position
        and all(used < position for used in last_use[: position - 1])
    ]


def _build(model: nn.Module, before: fx.Node, nodes: Sequence[fx.Node]) -> fx.GraphModule:
    """The network of `nodes`, whose input is the result of `before`."""
    graph = fx.Graph()
    copies = {before: graph.placeholder("passed")}

    def find(node: fx.Node) -> fx.Node:
        if node not in copies:  # a parameter that is used as it stands
            copies[node] = graph.node_copy(node, find)
        return copies[node]

    for node in nodes:
        find(node)
    graph.output(copies[nodes[-1]])
    return fx.GraphModule(model, graph)


def _refuse_shared(stages: Sequence[nn.Module]) -> None:
    seen: set[int] = set()
    for stage in stages:
        own = {id(parameter) for parameter in stage.parameters()}
        if own & seen:
            raise UsageError("--model: model_parallel: two stages would share a parameter")
        seen |= own


def shapes_between(stages: Sequence[nn.Module], sample: torch.Tensor) -> list[torch.Size]:
    """What passes from each stage to the next, of one sample; `sample`: a batch of one."""
    shapes, value = [], sample
    with torch.no_grad():
        for stage in stages[:-1]:
            training = stage.training
            value = stage.eval()(value)
            stage.train(training)
            shapes.append(value.shape[1:])
    return shapes
