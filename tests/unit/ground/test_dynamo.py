"""The compiler of torch is imported by what compiles, and by nothing else.

In a process for each, since this one may have imported it.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

STEPS = """
import importlib.util, sys
import FIRST
import torch
import hvdtrain
from hvdtrain.dynamo import EXCLUDED
assert sys.modules["torch._dynamo"].__file__.endswith("/torch/_dynamo/__init__.py")
assert importlib.util.find_spec("torch._dynamo").origin == sys.modules["torch._dynamo"].__file__
model = torch.nn.Linear(3, 2)
zero_grad = torch.optim.Optimizer.zero_grad.__wrapped__

def step(kind):
    optimizer = kind(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    return vars(zero_grad)[EXCLUDED]

step(torch.optim.SGD)
assert step(torch.optim.AdamW) is zero_grad
torch.library.define("hvdtrain_tests::double", "(Tensor x) -> Tensor")
torch.library.register_fake("hvdtrain_tests::double", lambda x: torch.empty_like(x))
assert "torch._dynamo.convert_frame" not in sys.modules, "imported too early"
"""
THEN = {
    "compile": """
compiled = torch.compile(lambda x: x.sin() + 1, backend="eager", fullgraph=True)
assert torch.equal(compiled(torch.ones(2)), torch.ones(2).sin() + 1)
""",
    "import of a part": "import torch._dynamo.config",
    "name of it": "from torch._dynamo import OptimizedModule",
    "disable": "assert torch._dynamo.disable(step) is not step",
    "setting": "torch._dynamo.config.recompile_limit = 3",
    "new attribute": "torch._dynamo.own = 1; assert sys.modules['torch._dynamo'].own == 1",
}
REAL = """
assert "torch._dynamo.convert_frame" in sys.modules
assert torch._dynamo.__path__ and sys.modules["torch._dynamo"] is torch._dynamo
assert step(torch.optim.SGD) is not zero_grad, "not excluded from compilation"
"""


@pytest.mark.parametrize("first", ["hvdtrain", "torch"])
@pytest.mark.parametrize("use", THEN)
def test_steps_do_not_import_the_compiler_and_its_use_does(use: str, first: str) -> None:
    """Fails if an optimizer's step, or a library that registers an operator, imports torch._dynamo
    (a new version of torch may ask something else of it), or what uses it meets another module
    than the real one, whichever of torch and hvdtrain a script imports first.
    """
    code = STEPS.replace("FIRST", first) + THEN[use] + REAL
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
