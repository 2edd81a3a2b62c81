"""`hvdtrain.launch` with several workers: from a notebook's kernel, and ended by Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import uuid
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from tests.parallel.launching import (
    BIN,
    environment_of,
    kill_all,
    wait_until_gone,
)

LIMIT_S = 240  # of a cell, on a busy machine

DEFINITIONS = """
import torch
from torch.utils.data import DataLoader, TensorDataset

import hvdtrain

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layers = torch.nn.Linear(8, 4), torch.nn.Dropout(), torch.nn.Linear(4, 1)
        self.layers = torch.nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x)

def data():
    x = torch.randn(50, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True))
"""
TRAIN = """
def train(rate, virtual_workers):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    loader = DataLoader(data(), 16, shuffle=True)
    with hvdtrain.Loop(model, optimizer, loader, epochs=2, virtual_workers=virtual_workers) as loop:
        for step in loop:
            for x, y in step.batches():
                loss = torch.nn.functional.mse_loss(model(x), y)
                step.backward(mean=loss, count=len(y))
            step.update()
        print("10%\\rworker of", loop.size)
        return loop.rank, loop.folder.name, model
"""
RUNS = """
results = {n: hvdtrain.launch(train, (0.01,), {"virtual_workers": 3}, np=n) for n in (1, 2, 3)}
"""
COMPARE = """
(_, _, alone), = results[1]
for n, workers in results.items():
    print(n, [(rank, folder) for rank, folder, _ in workers], all(
        type(model) is Net and all(map(torch.equal, model.parameters(), alone.parameters()))
        for _, _, model in workers
    ))
"""
FAIL = """
def fail():
    rank = hvdtrain.init().rank
    if rank == 1:
        raise ValueError("of this cell")
    hvdtrain.init().all_gather_object(rank, "all")

hvdtrain.launch(fail, np=2, controller="gloo")
"""


def test_a_notebook(tmp_path: Path) -> None:
    """Fails if functions and classes of cells do not reach the workers, their lines do not reach
    the cell, another number of workers learns something else, or a failure does not name the rank
    and the line in the cell.
    """
    cells = [nbformat.v4.new_code_cell(text) for text in (DEFINITIONS, TRAIN, RUNS, COMPARE, FAIL)]
    notebook, mark = nbformat.v4.new_notebook(cells=cells), uuid.uuid4().hex
    client = NotebookClient(
        notebook,
        timeout=LIMIT_S,
        kernel_name="python3",
        allow_errors=True,
        resources={"metadata": {"path": str(tmp_path)}},
    )
    try:
        client.execute(env=environment_of(mark))
    finally:
        left = wait_until_gone(mark)
        kill_all(left)
    assert not left
    texts = ["".join(str(o.get("text", o.get("evalue"))) for o in cell.outputs) for cell in cells]
    lines = texts[2].splitlines()
    for line in ("worker of 1", "[1] worker of 2", "[0] worker of 3", "[2] worker of 3"):
        assert lines.count(line) == 1, texts
    assert "\r" not in texts[2]
    assert texts[3].splitlines() == [
        "1 [(0, 'train')] True",
        "2 [(0, 'train-2'), (1, 'train-2')] True",
        "3 [(0, 'train-3'), (1, 'train-3'), (2, 'train-3')] True",
    ], texts
    of_the_cell = r"""line \d, in fail\n    raise ValueError\("of this cell"\)\n"""
    pattern = rf"rank 1 failed:\n.*{of_the_cell}.*ValueError: of this cell"
    assert re.search(pattern, texts[4], re.DOTALL), texts[4]


SLEEPER = """
import time
import hvdtrain

def function():
    print("worker", hvdtrain.init().rank)
    time.sleep(1000)

hvdtrain.launch(function, np=2)
"""


def test_ctrl_c(tmp_path: Path) -> None:
    """Fails if Ctrl-C does not interrupt the call, or a worker or a file is left behind."""
    mark, scratch = uuid.uuid4().hex, tmp_path / "scratch"
    scratch.mkdir()
    process = subprocess.Popen(
        [str(BIN / "python"), "-c", SLEEPER],
        cwd=tmp_path,
        env=environment_of(mark) | {"TMPDIR": str(scratch), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        begun = [process.stdout.readline() for _ in range(2)]
        assert sorted(begun) == ["[0] worker 0\n", "[1] worker 1\n"]
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=LIMIT_S)
    finally:
        left = wait_until_gone(mark)
        kill_all(left)
        process.communicate()
    assert not left and "KeyboardInterrupt" in errors, errors
    assert list(scratch.glob("hvdtrain-*")) == []
