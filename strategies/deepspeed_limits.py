"""What DeepSpeed can't serve, said before it is tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..distributed.comparing import is_alike_everywhere
from ..distributed.errors import ConfigError, ShapeMismatchError
from ..distributed.exchange import exchange
from .deepspeed_dummies import DummyOptim, scheduler_of
from .optimizer import parameters_of
from .sharded_state import check_parameters
from .suitability import is_trainable

_OF_MATRICES = (torch.optim.Adafactor, torch.optim.Muon)
"""Optimizers that compute with a whole matrix, where DeepSpeed has parts of many in one row."""


def check_served(model: nn.Module, optimizers: Sequence[Optimizer], method: str | None, stage: int) -> None:
    """Refuse a model with optimizers that can't be set up together. Local.

    Args:
        model: as it was given.
        optimizers: of it; none for a model that is only evaluated.
        method: as `Strategy.setup` takes it.
        stage: of ZeRO.
    Raises:
        ConfigError: says what does not fit, and what to do.
    """
    name = type(model).__name__
    if method is None and optimizers:
        raise ConfigError(
            f"{name} is trained by manual optimization, which strategy='deepspeed' can't serve: its engine has one "
            "optimizer, and steps where gradients were reduced. Use automatic optimization, or 'ddp'."
        )
    if len(optimizers) > 1:
        raise ConfigError(
            f"{name} has {len(optimizers)} optimizers, and strategy='deepspeed' steps one. Put their parameters "
            "into groups of one optimizer."
        )
    for optimizer in optimizers:
        _check_optimizer(optimizer, model, stage)
    if method == "forward" and not optimizers and is_trainable(model):
        raise ConfigError(
            f"{name} was set up without its optimizer, and strategy='deepspeed' spreads both together. Pass both "
            "in one call: accelerator.prepare(model, optimizer); for a model that is only evaluated, "
            "prepare_model(model, evaluation_mode=True)."
        )


def check_steps_rows(optimizer: Optimizer, model: nn.Module, stage: int) -> None:
    """Refuse an optimizer, or parameters, of which DeepSpeed can't make rows that are cut anywhere. Local.

    Args:
        optimizer: of the model's parameters.
        model: with values or without.
        stage: of ZeRO; at 0 nothing is cut.
    Raises:
        ConfigError: says what does not fit, and what to do.
    """
    name = type(optimizer).__name__
    for path, parameter in model.named_parameters():
        if not vars(parameter).get("ds_shape", parameter.shape):
            raise ConfigError(
                f"parameter {path} of {type(model).__name__} is a scalar, which DeepSpeed can't send to other "
                "processes. Give it the shape (1,)."
            )
    if stage and isinstance(optimizer, _OF_MATRICES):
        raise ConfigError(
            f"{name} computes with whole matrices, and DeepSpeed gives it parts of them in a row. Use an optimizer "
            "that computes each number by itself, such as AdamW, or another strategy."
        )
    if stage and isinstance(optimizer, torch.optim.Adagrad) and len(optimizer.param_groups) > 1:
        raise ConfigError(
            f"Adagrad has {len(optimizer.param_groups)} groups, which DeepSpeed makes one of. Give it one, or use "
            "another strategy."
        )


def check_same_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Refuse an optimizer that differs from those of other processes. Collective: one small one if all is well.

    Raises:
        ShapeMismatchError: on every process: shows what each process has.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    kind = type(optimizer).__name__
    groups = [[names[id(p)] for p in group["params"] if p.requires_grad] for group in optimizer.param_groups]
    if is_alike_everywhere((kind, groups), f"setup of {kind}"):
        return
    found = exchange((kind, [len(group) for group in groups]), f"comparison of {kind}")
    shown = "\n".join(f"  process {i}: {its_kind}, groups of {sizes}" for i, (its_kind, sizes) in enumerate(found))
    raise ShapeMismatchError(
        f"{kind} is not the same optimizer on all processes, by its class or its trained parameters:\n{shown}\n"
        "Give it the same parameters in the same order everywhere."
    )


def check_clipping(config: Mapping[str, Any], max_norm: float) -> None:
    """Refuse a limit for gradients beside another one in DeepSpeed's configuration. Local.

    Raises:
        ConfigError: names both.
    """
    configured = config.get("gradient_clipping")
    if isinstance(configured, (int, float)) and configured not in (0, max_norm):
        raise ConfigError(
            f"gradients are to be clipped at {max_norm} (clip_norm, clip_grad_norm_), and DeepSpeed's config has "
            f"gradient_clipping={configured!r}. Give the limit in one place, and 'auto' in the config."
        )


def check_dummies(optimizer: Optimizer, config: Mapping[str, Any]) -> None:
    """Refuse an optimizer and its scheduler that don't belong to DeepSpeed's configuration. Local.

    Raises:
        ConfigError: a section is there and nothing that stands for it, or the other way round.
    """
    is_dummy, scheduler = isinstance(optimizer, DummyOptim), scheduler_of(optimizer)
    if is_dummy and "optimizer" not in config:
        raise ConfigError("DummyOptim stands for an optimizer of DeepSpeed's config, which has none. Use torch's own.")
    if not is_dummy and "optimizer" in config:
        raise ConfigError(
            f"DeepSpeed's config has an optimizer, and {type(optimizer).__name__} was given. Give DummyOptim(params), "
            "or take 'optimizer' out of the config."
        )
    has_callable = scheduler is not None and scheduler.lr_scheduler_callable is not None
    if scheduler is not None and not has_callable and "scheduler" not in config:
        raise ConfigError(
            "DummyScheduler stands for a scheduler of DeepSpeed's config, which has none. Use torch's own, or "
            "lr_scheduler_callable=."
        )
    if scheduler is None and "scheduler" in config:
        raise ConfigError(
            "DeepSpeed's config has a scheduler, and the optimizer has no DummyScheduler. Make one: "
            "DummyScheduler(optimizer), or take 'scheduler' out of the config."
        )


def check_readable(deepspeed: Any, config: Mapping[str, Any]) -> None:
    """Let DeepSpeed read a complete configuration, and look whether it knows the classes in it. Local.

    Raises:
        ConfigError: it refuses the configuration, or does not know a class.
    """
    from deepspeed.runtime import config as sections
    from deepspeed.runtime import lr_schedules

    try:
        read = deepspeed.DeepSpeedConfig(dict(config))
    except (sections.DeepSpeedConfigError, AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"DeepSpeed refuses its config: {error}") from error
    kinds = {
        "optimizer": (read.optimizer_name, {*sections.DEEPSPEED_OPTIMIZERS, *vars(torch.optim)}),
        "scheduler": (read.scheduler_name, {*vars(lr_schedules), *vars(torch.optim.lr_scheduler)}),
    }
    for section, (name, known) in kinds.items():
        if section in config and name not in known:
            raise ConfigError(f"DeepSpeed's config has a type {name!r} of {section}, which DeepSpeed does not know.")


def _check_optimizer(optimizer: Optimizer, model: nn.Module, stage: int) -> None:
    name = type(optimizer).__name__
    check_parameters(optimizer, model, {id(parameter): None for parameter in model.parameters()})
    if not any(parameter.requires_grad for parameter in parameters_of(optimizer)):
        raise ConfigError(f"{name} has no trainable parameter. Unfreeze some, or add them.")
    check_steps_rows(optimizer, model, stage)
    for path, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ConfigError(
                f"parameter {path} of {type(model).__name__} has no values (device meta). Build the model without "
                "torch.device('meta'); with zero3_init=True it is in parts from the beginning."
            )
