"""`loopwright checkpoint show|verify|convert`, run in this process on checkpoints of real runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from loopwright import Accelerator, ModelCheckpoint, Task, Trainer
from loopwright.checkpoint.contents import Contents
from loopwright.checkpoint.manifest import Facts
from loopwright.checkpoint.saving import save_checkpoint
from loopwright.cli.main import main


class Line(Task):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.net(batch[0]).square().mean()
        self.log("train/loss", loss, on_step=False, on_epoch=True)
        return loss  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def train(max_steps: int, *, name: str = "a", resume_from: str | Path = "latest", **options: Any) -> None:
    callback = ModelCheckpoint(every="2 steps", top_k=-1)
    trainer = Trainer(max_steps=max_steps, name=name, callbacks=[callback], progress=False, trackers=False, seed=1,
                      **options)  # fmt: skip
    trainer.fit(Line(), DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2), resume_from=resume_from)


def checkpoints(name: str = "a") -> list[Path]:
    return sorted(Path("runs", name, "checkpoints").iterdir())


def small(path: Path, **facts: Any) -> Path:
    contents = Contents(
        trees={"state": {"step": 3, "who": ("a", None), "ema": [torch.zeros(2, 3), {}], 7: torch.float16}},
        weights={"model": {"weight": torch.ones(2, 2), "bias": torch.ones(2)}},
    )
    return save_checkpoint(path, contents, Facts(**facts))


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["checkpoint", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("loopwright checkpoint: ")
    return captured.err


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["checkpoint", *arguments]) == code
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def squeezed(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


class TestShow:
    def test_what_a_checkpoint_of_a_run_holds(self, capsys: pytest.CaptureFixture[str]) -> None:
        train(4)
        lines = squeezed(output_of(capsys, "show", str(checkpoints()[-1])))
        assert lines[0] == f"checkpoint {checkpoints()[-1]}"
        assert lines[1] == "kind state, number 2 of its folder, format 1"
        assert lines[3].endswith("name a, task Line")
        assert "step 4, skipped_steps 0, samples 8" in lines[4]
        assert lines[5] == "processes 1, SingleDeviceStrategy"
        assert "models model: 2 tensors, 3 elements, float32" in lines
        assert "states optimizers, process-00000, state" in lines
        size = (checkpoints()[-1] / "model.safetensors").stat().st_size
        assert f"files model.safetensors {size} bytes" in lines
        assert not any(line.startswith("lineage") for line in lines)

    def test_the_lineage_over_three_legs_and_a_branch(self, capsys: pytest.CaptureFixture[str]) -> None:
        train(2)
        with pytest.warns(UserWarning, match="accumulate was 1 and is 2"):
            train(4, accumulate=2)
        with pytest.warns(UserWarning, match="precision was 'no' and is 'bf16'"):
            train(6, name="b", resume_from=checkpoints()[-1], accumulate=2, precision="bf16")
        newest = checkpoints("b")[-1]
        report = json.loads(output_of(capsys, "show", str(newest), "--json"))
        steps = [(each["checkpoint"], each["step"], each["run"]["name"]) for each in report["lineage"]]
        first, second = checkpoints()
        assert steps == [(second.name, 4, "a"), (first.name, 2, "a")]
        assert [each["path"] for each in report["lineage"]] == [str(second.absolute()), str(first.absolute())]
        assert [bool(each["changes"]) for each in report["lineage"]] == [True, True]
        assert report["manifest"]["progress"]["step"] == 6
        assert report["lineage"][1]["changes"] == ["accumulate was 1 and is 2"]
        text = squeezed(output_of(capsys, "show", str(newest)))
        assert f"lineage resumed from {second.name} (run a, number 2, step 4), at {second.absolute()}" in text
        assert "accumulate was 1 and is 2" in text
        for file in second.iterdir():
            file.unlink()
        second.rmdir()
        text = squeezed(output_of(capsys, "show", str(newest)))
        assert f"lineage resumed from {second.name} (run a, number 2, step 4), no longer there" in text
        assert f"resumed from {first.name} (run a, number 1, step 2), at {first.absolute()}" in text

    def test_the_lineage_of_an_accelerator_says_how_far_it_was(self, capsys: pytest.CaptureFixture[str]) -> None:
        def leg(*folders: str, load: str | None = None) -> None:
            accelerator = Accelerator(cpu=True)
            model, optimizer = nn.Linear(2, 1), torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
            loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            if load is not None:
                accelerator.load_state(load)
            for folder, _ in zip(folders, loader, strict=False):
                accelerator.save_state(folder)

        leg("runs/1", "runs/2", "runs/3")
        leg("runs/4", load="runs/3")
        text = squeezed(output_of(capsys, "show", "runs/4"))
        place = Path("runs/3").absolute()
        assert f"lineage resumed from 3 (run runs, number 3, epoch 0, batch 3), at {place}" in text

    def test_scores_and_reasons(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        score = {"name": "val/loss", "mode": "min", "value": 0.25}
        path = small(tmp_path / "c", scores=[score], inexact=["the first", "the second"])
        (path / "notes.txt").touch()
        lines = squeezed(output_of(capsys, "show", str(path)))
        assert "scores val/loss 0.25 (min is best)" in lines
        assert lines[lines.index("inexact the first") + 1] == "the second"
        assert "not of it notes.txt" in lines

    def test_a_tree(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = str(small(tmp_path / "c"))
        assert squeezed(output_of(capsys, "show", path, "--tree", "state")) == [
            "state.step 3",
            'state.who[0] "a"',
            "state.who[1] null",
            "state.ema[0] tensor float32 (2, 3)",
            "state.ema[1] empty dict",
            'state[7] dtype name "float16"',
        ]
        lines = json.loads(output_of(capsys, "show", path, "--tree=state", "--json"))
        assert lines[3] == {"path": "state.ema[0]", "value": "tensor float32 (2, 3)"}
        assert "has no state 'stat'. Did you mean 'state'?" in error_of(capsys, "show", path, "--tree", "stat")

    def test_weights_of_others(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        weight = torch.ones(2, 2)
        content = {
            "state_dict": {"a": weight, "b": weight, "n": torch.tensor(1)},
            "epoch": 3, "hyper_parameters": {"lr": 0.1, "tags": ["x"]}, "optimizer_states": [1, 2],
        }  # fmt: skip
        torch.save(content, tmp_path / "w.ckpt")
        assert squeezed(output_of(capsys, "show", "w.ckpt")) == [
            "weights w.ckpt",
            "models model: 2 tensors, 5 elements, 1 float32, 1 int64, 1 tied: b",
            "beside epoch: 3",
            "hyper_parameters.lr: 0.1",
            "hyper_parameters.tags: ['x']",
            "optimizer_states: a list of 2",
        ]
        report = json.loads(output_of(capsys, "show", "w.ckpt", "--json"))
        assert report["beside"]["model"]["epoch"] == "3"
        assert "'w.ckpt' is no checkpoint of Loopwright" in error_of(capsys, "show", "w.ckpt", "--tree=state")

    def test_what_is_no_checkpoint(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "'nowhere' is no checkpoint: it is not there" in error_of(capsys, "show", "nowhere")
        small(tmp_path / "all" / "c")
        assert "it holds some: c. Name one of them" in error_of(capsys, "show", "all")
        (tmp_path / "all" / "c" / "state.json").unlink()
        assert "is damaged: state.json: missing" in error_of(capsys, "show", "all/c")
        manifest = tmp_path / "all" / "c" / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"format_version": 1', '"format_version": 3'))
        assert "has the format version 3" in error_of(capsys, "show", "all/c")


class TestVerify:
    def test_each_damage_is_a_line(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for name in ("a", "deep/b", "deep/c", "deep/.d.host-1.partial", "e"):
            small(tmp_path / "all" / name)
        lines = output_of(capsys, "verify", "all").splitlines()
        assert [line.partition(": whole, 3 files, ")[0] for line in lines] == [
            "all/a",
            "all/deep/b",
            "all/deep/c",
            "all/e",
        ]
        (tmp_path / "all/a/extra").touch()
        os.truncate(tmp_path / "all/deep/b/model.safetensors", 5)
        data = bytearray((tmp_path / "all/deep/c/state.safetensors").read_bytes())
        data[-1] ^= 1
        (tmp_path / "all/deep/c/state.safetensors").write_bytes(data)
        (tmp_path / "all/deep/c/model.safetensors").unlink()
        (tmp_path / "all/e/manifest.json").write_text("{}")
        lines = output_of(capsys, "verify", "all", code=1).splitlines()
        size = (tmp_path / "all/a/model.safetensors").stat().st_size
        assert lines[0].endswith("; not part of it: extra")
        assert lines[1] == f"all/deep/b: damaged: model.safetensors: expected {size} bytes, found 5"
        assert lines[2] == "all/deep/c: damaged: model.safetensors: missing"
        assert lines[3].startswith("all/deep/c: damaged: state.safetensors: expected SHA-256 ")
        assert lines[4].startswith("all/e: damaged: 'all/e/manifest.json' is damaged: ")
        report = json.loads(output_of(capsys, "verify", "--json", "all/a", "all/deep", code=1))
        assert report["all/a"] == []
        assert [len(damage) for damage in report.values()] == [0, 1, 2]

    def test_where_there_is_none(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        small(tmp_path / "c")
        (tmp_path / "empty").mkdir()
        assert "'empty' is no checkpoint: it has no manifest.json" in error_of(capsys, "verify", "c", "empty")


class TestConvert:
    def test_a_checkpoint(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = small(tmp_path / "c")
        size = (path / "model.safetensors").stat().st_size
        assert output_of(capsys, "convert", "c", "out") == f"out/model.safetensors: 2 tensors, {size} bytes\n"
        assert torch.equal(load_file("out/model.safetensors")["weight"], torch.ones(2, 2))
        assert os.listdir("out") == ["model.safetensors"]
        assert "'out' exists already" in error_of(capsys, "convert", "c", "out").replace(f"{tmp_path}/", "")
        (models,) = json.loads(output_of(capsys, "convert", "c", "two", "--max-shard-size=16B", "--json"))
        assert models["files"][-1] == "model.safetensors.index.json"
        assert {*os.listdir("two")} == {*models["files"]}

    def test_a_file_of_others(self, capsys: pytest.CaptureFixture[str]) -> None:
        torch.save({"state_dict": {"model._orig_mod.a": torch.ones(1), "head": torch.ones(1)}}, "w.ckpt")
        text = output_of(capsys, "convert", "w.ckpt", "out", "--prefix", "model.", "--to", "torch")
        lines = text.splitlines()
        assert lines[0].startswith("out/pytorch_model.bin: 1 tensors, ")
        assert lines[1:] == ["  without the names of wrappers: _orig_mod.a is a", "  left out (1): head"]
        assert torch.load("out/pytorch_model.bin", weights_only=True) == {"a": torch.ones(1)}

    def test_tied_weights_are_counted_as_they_are_written(self, capsys: pytest.CaptureFixture[str]) -> None:
        weight = torch.ones(2, 2)
        torch.save({"a": weight, "b": weight, "c": torch.ones(1)}, "w.bin")
        assert output_of(capsys, "convert", "w.bin", "out").startswith("out/model.safetensors: 2 tensors, ")
        assert len(load_file("out/model.safetensors")) == 2
        assert main(["merge-weights", "w.bin", "two", "--max_shard_size", "16B", "--json"]) == 0
        (model,) = json.loads(capsys.readouterr().out)
        assert (model["num_tensors"], len(model["files"])) == (2, 3)

    def test_weights_of_a_run_are_those_that_the_run_reads(self, capsys: pytest.CaptureFixture[str]) -> None:
        train(2)
        output_of(capsys, "convert", str(checkpoints()[-1]), "out")
        assert load_file("out/model.safetensors").keys() == {"net.weight", "net.bias"}


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "no command is given. Accepted: convert, show, verify."),
            (["shw"], "'shw' is no command of it. Did you mean 'show'?"),
            (["show"], "show: got 0 paths. Expected show PATH."),
            (["convert", "a"], "convert: got 1 paths. Expected convert PATH OUT."),
            (["verify", "--json"], "verify: got 0 paths. Expected verify PATH...."),
            (["show", "a", "--tre", "x"], "show has no option '--tre'. Did you mean '--tree'?"),
            (["convert", "a", "b", "--to"], "--to has no value. Write --to=VALUE."),
            (["convert", "a", "b", "--to", "--json"], "--to has no value"),
            (["verify", "a", "--json=yes"], "verify has no option '--json=yes'"),
        ],
    )
    def test_what_can_not_be_used(self, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
        assert message in error_of(capsys, *arguments)

    def test_help_is_light(self) -> None:
        code = (
            "import sys; from loopwright.cli.main import main\n"
            "codes = [main(['checkpoint', *words]) for words in (['--help'], ['show', '-h'], ['shw'])]\n"
            "heavy = {'torch', 'jsonargparse', 'yaml', 'numpy'} & set(sys.modules)\n"
            "sys.exit(0 if codes == [0, 0, 2] and not heavy else f'{codes} {heavy}')"
        )
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert run.returncode == 0, run.stderr
        assert run.stdout.startswith("usage: loopwright checkpoint show PATH")
