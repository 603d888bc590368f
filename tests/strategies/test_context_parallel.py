"""Context parallelism: what models leave out for it, and on two devices the losses of whole sequences."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from loopwright.distributed.errors import ConfigError
from loopwright.strategies.context_parallel import prepare_attention


class Attention(nn.Module):
    """Gives back how it was called."""

    def forward(self, hidden: Any, attention_mask: Any = None, is_causal: bool = False) -> Any:
        return hidden, attention_mask, is_causal


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(**options)
        self.self_attn, self.other = Attention(), Attention()


def test_attention_goes_without_its_mask() -> None:
    model = Model(layer_types=["full_attention", "full_attention"])
    prepare_attention(model)
    assert model.self_attn(1, attention_mask="mask") == (1, None, True)
    assert model.self_attn(1) == (1, None, False)
    assert model.other(1, attention_mask="mask") == (1, "mask", False)


@pytest.mark.parametrize("options", [{"layer_types": ["sliding_attention"]}, {"sliding_window": 4}])
def test_narrow_attention_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Model has attention of kind sliding_attention, and context parallelism"):
        prepare_attention(Model(**options))


@pytest.mark.gpu(count=2)
def test_losses_of_whole_sequences() -> None:
    script = Path(__file__).with_name("context_script.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
