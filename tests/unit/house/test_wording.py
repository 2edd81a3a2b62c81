"""Messages of a script: its own keywords in place of flags."""

from __future__ import annotations

import pytest

from hvdtrain.errors import AgreedFailure, UsageError
from hvdtrain.run.script import as_options, in_words_of_script


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "--experiment=u: runs/u is taken. Choose another --experiment or --output, or remove",
            "experiment='u': runs/u is taken. Choose another experiment or output, or remove",
        ),
        ("--device=cuda: none. Use --device cpu, or", "device='cuda': none. Use device='cpu', or"),
        ("Give --global-batch-size 32 or less", "Give global_batch_size=32 or less"),
        ("--clip-grad=0.5: no", "clip_grad=0.5: no"),
        ("(--sync-bn: the whole batch's)", "(sync_bn=True: the whole batch's)"),
        ("--resume auto restores it", "resume='auto' restores it"),
        ("use --audit bound.", "use audit='bound'."),
        ("Lower --lr, or add --clip-grad", "Lower the learning rate, or add clip_grad"),
        ("hvdtrain doctor --burn-in", "hvdtrain doctor --burn-in"),
        ("launch --restarts 3", "launch --restarts 3"),
        ("a -- b, x--epochs", "a -- b, x--epochs"),
    ],
)
def test_flags_become_keywords(text: str, expected: str) -> None:
    """Fails if a script is advised to give a flag, or a flag of another command is lost."""
    assert as_options(text) == expected


@pytest.mark.parametrize(
    "error",
    [
        UsageError("--epochs=0: must be at least 1", "--seed=x"),
        AgreedFailure({0: (2, "--epochs=0: must be at least 1")}, 1),
    ],
)
def test_errors_keep_their_type_and_code(error: UsageError | AgreedFailure) -> None:
    """Fails if the error becomes another, or one of its texts keeps its flags."""
    code = error.exit_code
    with pytest.raises(type(error)) as caught, in_words_of_script():
        raise error
    assert caught.value is error and error.exit_code == code
    assert str(error).startswith("epochs=0: must be at least 1") and "--" not in str(error)
    assert "--" not in "".join(getattr(error, "problems", ()))
