"""Strategies by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from torch import nn
from torch.optim import Optimizer

from loopwright.distributed.errors import ConfigError
from loopwright.strategies import registry
from loopwright.strategies.ddp import DDPStrategy
from loopwright.strategies.registry import create_strategy, register_strategy
from loopwright.strategies.single import SingleDeviceStrategy
from loopwright.strategies.strategy import Strategy


@pytest.fixture
def own_words() -> Iterator[None]:
    """Words that a test registers are gone after it."""
    known = registry._strategies.registered
    before = dict(known)
    yield
    known.clear()
    known.update(before)


class Slow(Strategy):
    def __init__(self, seconds: int = 1) -> None:
        super().__init__()
        self.seconds = seconds

    def setup(
        self, model: nn.Module, optimizers: Sequence[Optimizer], method: str | None = "forward"
    ) -> tuple[nn.Module, list[Optimizer]]:
        return model, list(optimizers)


@pytest.mark.parametrize("spec", ["single", "auto", {"name": "single"}, {"name": "auto"}])
def test_words_of_the_single_device(spec: Any) -> None:
    assert type(create_strategy(spec)) is SingleDeviceStrategy


@pytest.mark.parametrize("spec", ["ddp", {"name": "ddp"}])
def test_words_of_copies_in_each_process(spec: Any) -> None:
    assert type(create_strategy(spec)) is DDPStrategy


def test_what_auto_means() -> None:
    assert type(create_strategy("auto", num_processes=2)) is DDPStrategy
    strategy = create_strategy({"name": "auto", "find_unused_parameters": True, "comm_hook": "bf16"}, 2)
    assert isinstance(strategy, DDPStrategy)
    assert strategy.settings.to_kwargs() == {"find_unused_parameters": True}
    assert strategy.settings.comm_hook == "bf16"
    with pytest.raises(ConfigError, match=r"strategy='ddp' does not take these options \(speed=2\): .*'speed'"):
        create_strategy({"name": "ddp", "speed": 2})


def test_an_object_is_itself() -> None:
    strategy = Slow()
    assert create_strategy(strategy) is strategy


@pytest.mark.usefixtures("own_words")
def test_a_registered_word_takes_options() -> None:
    assert register_strategy("slow")(Slow) is Slow
    strategy = create_strategy({"name": "slow", "seconds": 3})
    assert isinstance(strategy, Slow)
    assert strategy.seconds == 3
    with pytest.raises(ConfigError, match=r"strategy='slow' does not take these options \(speed=2\): .*'speed'"):
        create_strategy({"name": "slow", "speed": 2})


@pytest.mark.usefixtures("own_words")
@pytest.mark.parametrize("word", ["single", "auto", "ddp", "slow"])
def test_a_word_that_is_taken(word: str) -> None:
    register_strategy("slow")(Slow)
    with pytest.raises(ConfigError, match=rf"register_strategy\('{word}'\): this word is taken\. Choose another"):
        register_strategy(word)(SingleDeviceStrategy)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("singel", r"'singel' is unknown\. Did you mean 'single'\? Accepted: auto, ddp, deepspeed, fp8, fsdp, pip"),
        ("mine.Fast", r"strategy='mine\.Fast' is unknown\. .* write \{class_path: mine\.Fast\}"),
        ({"nome": "single"}, r"strategy=\{'nome': 'single'\} has no 'name'"),
        (3, r"strategy=3\. Expected a word, a mapping with 'name', or a Strategy object"),
    ],
)
def test_what_names_no_strategy(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create_strategy(spec)
