"""What `loopwright config` asks of FSDP, meshes and DeepSpeed, where several processes are chosen."""

from __future__ import annotations

from typing import Any

from .asking import ask_word, fill
from .deepspeed_machines import STANDARD

Keys = dict[str, Any]


def ask_strategy(keys: Keys) -> None:
    """Ask how a model is spread over the processes, and for the options of that."""
    word = ask_word("How is a model spread over the processes", ("ddp", "fsdp", "deepspeed"), "ddp")
    if word == "fsdp":
        keys["distributed_type"] = "FSDP"
        keys["fsdp_config"] = _ask_fsdp()
        mesh = _ask_mesh(keys["num_processes"])
        if mesh:
            keys["parallelism_config"] = mesh
    if word == "deepspeed":
        keys["distributed_type"] = "DEEPSPEED"
        keys["deepspeed_config"] = _ask_deepspeed(keys)


def _ask_fsdp() -> Keys:
    found: Keys = {"fsdp_version": 2}
    policy = ask_word("Which modules are gathered together", ("transformer", "size", "none"), "transformer")
    if policy == "transformer":
        found["fsdp_auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"
        question = "Their classes, with commas (Enter: as the model says)?"
        fill(found, "fsdp_transformer_layer_cls_to_wrap", question, None, may_be_empty=True)
    elif policy == "size":
        found["fsdp_auto_wrap_policy"] = "SIZE_BASED_WRAP"
        fill(found, "fsdp_min_num_params", "From how many parameters on?", 100_000_000, least=1)
    else:
        found["fsdp_auto_wrap_policy"] = "NO_WRAP"
    frees = fill(found, "fsdp_reshard_after_forward", "Free weights between forward and backward?", "true")
    found["fsdp_reshard_after_forward"] = {"true": True, "false": False}.get(frees, frees)
    fill(found, "fsdp_offload_params", "Keep the parts on the host?", False)
    fill(found, "fsdp_activation_checkpointing", "Compute activations twice, to save memory?", False)
    fill(found, "fsdp_cpu_ram_efficient_loading", "Let transformers load weights in one process alone?", False)
    fill(found, "fsdp_state_dict_type", "In which form are checkpoints?", "SHARDED_STATE_DICT")
    return found


def _ask_mesh(num_processes: int) -> Keys:
    """The sizes of a mesh; nothing where all processes are to have a part each."""
    found: Keys = {}
    question = "In how many parts is each layer cut (tensor parallelism)?"
    tensor = fill(found, "parallelism_config_tp_size", question, 1, least=1)
    question = "How many groups of processes have a copy each?"
    copies = fill(found, "parallelism_config_dp_replicate_size", question, 1, least=1)
    if tensor == copies == 1:
        return {}
    return {**found, "parallelism_config_dp_shard_size": max(1, num_processes // tensor // copies)}


def _ask_deepspeed(keys: Keys) -> Keys:
    found: Keys = {}
    question = "A file of DeepSpeed's options (Enter: none)?"
    if fill(found, "deepspeed_config_file", question, None, may_be_empty=True) is None:
        _ask_zero(found)
    if keys["num_machines"] > 1:
        question = "What starts the processes of all machines?"
        if fill(found, "deepspeed_multinode_launcher", question, STANDARD) != STANDARD:
            fill(found, "deepspeed_hostfile", "The file of the machines and their slots?", None)
    return found


def _ask_zero(found: Keys) -> None:
    stage = int(fill(found, "zero_stage", "Which ZeRO stage (0 to 3)?", 2))
    for what, least in (("optimizer", 2), ("param", 3)):
        if stage < least:
            continue
        question = f"Where are the {what} states kept (none, cpu, nvme)?"
        if fill(found, f"offload_{what}_device", question, "none") == "nvme":
            fill(found, f"offload_{what}_nvme_path", "In which folder?", None)
    fill(found, "gradient_clipping", "The largest norm of gradients (Enter: any)?", None, may_be_empty=True)
    if stage == 3:
        fill(found, "zero3_init_flag", "Build models in parts?", False)
        fill(found, "zero3_save_16bit_model", "Save 16-bit weights?", False)
