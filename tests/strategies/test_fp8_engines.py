"""Transformer Engine and MS-AMP, which need a CUDA device: against stand-ins with their documented interface, and for
real on a device (`gpu`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from loopwright.distributed.errors import ConfigError, MissingDependencyError
from loopwright.strategies.fp8_msamp import MSAMPBackend
from loopwright.strategies.fp8_recipes import MSAMPRecipeKwargs, TERecipeKwargs
from loopwright.strategies.fp8_transformer_engine import TransformerEngineBackend
from loopwright.trainer.accelerator import Accelerator
from loopwright.trainer.trainer import Trainer

from .fp8_nets import Block, losses, make

CUDA = torch.device("cuda")


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-ins can be imported, and are forgotten after it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "engines"))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("transformer_engine", "msamp")):
            del sys.modules[name]


def engine(**options: Any) -> TransformerEngineBackend:
    return TransformerEngineBackend(TERecipeKwargs(**options), CUDA, warns=True)


@pytest.mark.usefixtures("engines")
class TestTransformerEngine:
    def test_layers_are_swapped_with_their_parameters_and_back(self) -> None:
        block = Block()
        layers, parameters = dict(block.named_modules()), dict(block.named_parameters())
        before = block(torch.ones(2, 32))
        backend = engine()
        backend.convert(block, [])
        assert [type(each).__module__.partition(".")[0] for each in block.children()] == ["transformer_engine"] * 3
        assert all(parameter is parameters[name] for name, parameter in block.named_parameters())
        torch.testing.assert_close(block(torch.ones(2, 32)), before)
        block.inner.weight = nn.Parameter(torch.zeros(64, 32))  # as who shards or loads it may
        backend.restore(block)
        assert dict(block.named_modules()) == layers
        assert block.inner.weight.unique().tolist() == [0]

    def test_a_state_dict_has_neither_more_keys_nor_less(self) -> None:
        block = Block()
        before = {name: value.clone() for name, value in block.state_dict().items()}
        engine().convert(block, [])
        assert list(block.state_dict()) == list(before)
        assert block.load_state_dict(before).missing_keys == []

    def test_the_recipe(self) -> None:
        from transformer_engine.common.recipe import Format

        found = engine(fp8_format="e4m3", margin=2, amax_history_len=8, amax_compute_algo="MAX").settings
        assert (found.fp8_format, found.margin, found.amax_history_len, found.amax_compute_algo) == (
            Format.E4M3, 2, 8, "max",
        )  # fmt: skip
        assert engine(override_linear_precision=[False, False, True]).settings.override_linear_precision[2]
        with pytest.warns(
            UserWarning, match=r"TERecipeKwargs\(interval\) has no effect: the installed Transformer Engine"
        ):
            engine(interval=4)
        with pytest.raises(ConfigError, match=r"compute capability 10.0 or higher required.* backend='ao'"):
            engine(use_mxfp8_block_scaling=True)

    @pytest.mark.parametrize(("option", "enabled"), [(False, [True, False]), (True, [True, True])])
    def test_evaluations_are_in_high_precision_unless_they_are_not_to_be(
        self, option: bool, enabled: list[bool]
    ) -> None:
        block, backend = Block(), engine(use_autocast_during_eval=option)
        backend.convert(block, [])
        for is_training in (True, False):
            with backend.context(is_training):
                block(torch.ones(2, 32))
        assert block.inner.computed == enabled

    def test_sizes_that_do_not_fit(self) -> None:
        model = make()
        with pytest.warns(UserWarning, match=r"no multiples of 16: first \(8 x 32\), last \(32 x 4\)"):
            engine().convert(model, [])
        assert type(model.first) is nn.Linear
        with pytest.raises(ConfigError, match=r"no linear layer of Sequential is left to convert.*: 0 \(4 x 4\)"):
            engine().convert(nn.Sequential(nn.Linear(4, 4)), [])

    def test_it_is_not_there_for_sharded_models(self) -> None:
        assert "Use backend='ao'" in str(engine().restrictions)


@pytest.mark.usefixtures("engines")
class TestMSAMP:
    def test_a_model_with_its_optimizer_whose_states_stay_plain(self) -> None:
        import msamp

        block = Block()
        before = {name: value.clone() for name, value in block.state_dict().items()}
        optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
        backend = MSAMPBackend(MSAMPRecipeKwargs(opt_level="O1"), torch.device("cuda"))
        backend._device = torch.device("cpu")
        assert backend.convert(block, [optimizer]) == [optimizer]
        assert msamp.calls == ["O1"]
        assert block.inner.weight.dtype is torch.float16
        for name, value in block.state_dict().items():
            torch.testing.assert_close(value, before[name], atol=1e-3, rtol=0)

    def test_one_optimizer(self) -> None:
        backend = MSAMPBackend(MSAMPRecipeKwargs(), torch.device("cuda"))
        optimizer: Any = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        with pytest.raises(ConfigError, match="Block came with 2 optimizers"):
            backend.convert(Block(), [optimizer, optimizer])


class TestNotThere:
    def test_each_says_what_it_needs(self) -> None:
        message = (
            r"it can't be loaded .*compute capability 8\.9 .*: pip install --no-build-isolation 'transformer_engine"
        )
        with pytest.raises(MissingDependencyError, match=message):
            Accelerator(mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs()]).prepare(make())
        message = r"fp8 by MS-AMP: it can't be loaded .*pip install git\+https://github\.com/Azure/MS-AMP"
        with pytest.raises(MissingDependencyError, match=message):
            Trainer(max_steps=1, precision=MSAMPRecipeKwargs(), progress=False, trackers=False).validate(make(), [])

    @pytest.mark.usefixtures("engines")
    @pytest.mark.parametrize("recipe", [TERecipeKwargs(), MSAMPRecipeKwargs()])
    def test_a_device_that_can_not(self, recipe: Any) -> None:
        with pytest.raises(ConfigError, match=r"on a device of type 'cpu'\. It needs an NVIDIA device"):
            Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe]).prepare(make())


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [TERecipeKwargs(skip=["first", "last"]), MSAMPRecipeKwargs(opt_level="O1")])
def test_for_real(recipe: Any) -> None:
    pytest.importorskip({"te": "transformer_engine.pytorch", "msamp": "msamp"}[recipe.backend])
    plain = losses(make(), precision="bf16")
    assert losses(make(), precision=recipe) == pytest.approx(plain, rel=0.05)
