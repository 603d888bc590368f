"""`ProgressBar`: on a terminal, in a notebook, and where there is neither."""

from __future__ import annotations

import io
import os
import re
import select
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopwright.callbacks.callback import Callback
from loopwright.callbacks.progress import ProgressBar
from loopwright.distributed.errors import ConfigError
from loopwright.trainer.task import Task
from loopwright.trainer.trainer import Trainer

from ..nursery import nursery


class Tiny(Task):
    """Logs 0.25 as `loss` and 7 as `val` for the bar, and something that is not for it."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.seconds = seconds

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        time.sleep(self.seconds)
        self.log("loss", torch.tensor(0.25), progress_bar=True)
        self.log("hidden", 1.0)
        return self.net(batch).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        time.sleep(self.seconds)
        self.log("val", 7, progress_bar=True)

    test_step = validation_step

    def forward(self, batch: Tensor) -> Any:
        return self.net(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True

    @property
    def drawings(self) -> list[str]:
        """What was drawn, one by one, without the codes that move between lines."""
        return [part for part in re.split(r"\r|\n|\x1b\[A", self.getvalue()) if part.strip()]


def batches(count: int) -> list[Tensor]:
    return [torch.ones(1, 1)] * count


def trainer_with(*callbacks: Callback, **options: Any) -> Trainer:
    options = {"max_epochs": 1, "sanity_val_batches": 0, **options}
    return Trainer(callbacks=callbacks, trackers=False, **options)


def bar_on(stream: Terminal, **options: Any) -> ProgressBar:
    return ProgressBar(stream=stream, **{"refresh_seconds": 0.0, **options})


def lines_of(task: Task, count: int, val: int | None = None, *, every: Any = None, **options: Any) -> list[str]:
    """The plain lines of a fit over `count` batches, without what depends on the clock."""
    stream = io.StringIO()
    trainer = trainer_with(ProgressBar(every=every, stream=stream), **options)
    trainer.fit(task, batches(count), None if val is None else batches(val))
    return [re.sub(r"  (\S+ batches/s|left \S+)", "", line) for line in stream.getvalue().splitlines()]


# Bars


def test_bar_of_an_epoch() -> None:
    stream = Terminal()
    trainer_with(bar_on(stream), max_epochs=2).fit(Tiny(), batches(3))
    done = [d for d in stream.drawings if "loss=0.25" in d]
    counts = [re.search(r"epoch (\d)/2: +\d+%\|.*\| (\d)/3 \[.*batch", d) for d in done]
    assert [match.groups() for match in counts if match] == [
        ("1", "1"), ("1", "2"), ("1", "3"), ("2", "1"), ("2", "2"), ("2", "3"), ("2", "3"), ("2", "3"),
    ]  # fmt: skip
    assert "hidden" not in stream.getvalue()
    assert stream.getvalue().count("\n") == 1  # one bar, used for both epochs
    # tqdm writes spaces over the end of a longer drawing, as one with a higher rate was.
    assert stream.getvalue().rstrip().endswith("loss=0.25]")


def test_bars_that_stay() -> None:
    stream = Terminal()
    trainer_with(bar_on(stream, leave=True), max_epochs=3).fit(Tiny(), batches(2))
    kept = [line.rpartition("\r")[2] for line in stream.getvalue().split("\n")[:-1]]
    assert [re.match(r"epoch \d/3: 100%\|.*\| 2/2", line) is not None for line in kept] == [True] * 3


def test_validation_has_a_second_bar() -> None:
    stream = Terminal()
    trainer_with(bar_on(stream)).fit(Tiny(), batches(2), batches(3))
    nested = [d for d in stream.drawings if d.startswith("validation")]
    assert [re.search(r"\| (\d)/3 \[", d).group(1) for d in nested] == ["0", "1", "2", "3"]  # type: ignore[union-attr]
    assert "\nvalidation" in stream.getvalue().replace("\r", "")  # below the other
    last = stream.drawings[-1]
    assert last.startswith("epoch 1/1: 100%")
    assert "loss=0.25, val=7" in last


def test_drawing_is_limited() -> None:
    stream = Terminal()
    trainer_with(bar_on(stream, refresh_seconds=1000.0), max_epochs=50).fit(Tiny(), batches(20), batches(5))
    drawn = [re.search(r"epoch (\d+)/50: .* (\d+)/20 ", d) for d in stream.drawings]
    # The first batch opens the bar and draws it; the end of the run draws its state, and leaves it.
    assert [match.groups() for match in drawn if match] == [
        ("1", "0"),
        ("1", "1"),
        ("50", "0"),
        ("50", "20"),
        ("50", "20"),
    ]


def test_a_batch_without_drawing_is_one_call() -> None:
    bar = bar_on(Terminal(), refresh_seconds=1000.0)

    calls: list[str] = []

    class Count(Callback):
        def on_epoch_end(self, trainer: Any, task: Any, metrics: dict[str, float]) -> None:
            sys.setprofile(lambda frame, event, arg: calls.append(event))
            bar.on_batch_end(trainer, task, None)
            sys.setprofile(None)

    trainer_with(bar, Count()).fit(Tiny(), batches(2))
    # The function and its clock; the last one is `setprofile` itself.
    assert calls == ["call", "c_call", "c_return", "return", "c_call"]


def test_unknown_length() -> None:
    class Endless:
        def __iter__(self) -> Any:
            return iter(batches(3))

    stream = Terminal()
    trainer_with(bar_on(stream)).fit(Tiny(), Endless())
    assert re.match(r"epoch 1/1: 3batch \[", stream.drawings[-1])


@pytest.mark.parametrize(
    ("options", "last"),
    [
        ({"max_epochs": None, "max_steps": 3}, r"epoch 1: 100%\|.*\| 3/3 "),
        ({"max_epochs": None, "max_steps": 2, "accumulate": 2}, r"epoch 1: 100%\|.*\| 4/4 "),
        ({"max_epochs": 1.5}, r"epoch 2/2: 100%\|.*\| 5/5 "),
        ({"max_epochs": None, "max_steps": "13 batches"}, r"epoch 2: 100%\|.*\| 3/3 "),
        ({"max_epochs": None, "max_steps": 10**6, "max_time": 0.001}, r"epoch 1:  10%\|.*\| 1/10 "),
    ],
)
def test_a_limit_inside_an_epoch_is_the_total(options: dict[str, Any], last: str) -> None:
    stream = Terminal()
    trainer_with(bar_on(stream), **options).fit(Tiny(0.002), batches(10))
    assert re.match(last, stream.drawings[-1])


def test_validation_does_not_slow_the_rate_down() -> None:
    stream = Terminal()
    task = Tiny(0.01)
    trainer_with(bar_on(stream), val_every="2 steps").fit(task, batches(6), batches(20))
    rate = re.search(r"([\d.]+)batch/s", stream.drawings[-1])
    assert rate is not None
    assert float(rate.group(1)) > 25  # 6 batches of 0.01 s; with the three validations of 0.2 s it would be under 10


def test_the_first_drawing_counts_from_the_epochs_start() -> None:
    stream = Terminal()
    trainer_with(bar_on(stream), max_epochs=2).fit(Tiny(0.05), batches(1))
    rates = [float(rate) for rate in re.findall(r" ([\d.]+)batch/s, loss", stream.getvalue())]
    paces = [float(pace) for pace in re.findall(r" ([\d.]+)s/batch, loss", stream.getvalue())]
    assert rates or paces
    assert max(rates, default=0.0) <= 20  # one batch of 0.05 s and more
    assert min(paces, default=1.0) >= 0.05


def test_test_and_predict_have_bars() -> None:
    stream = Terminal()
    trainer, task = trainer_with(bar_on(stream)), Tiny()
    trainer.validate(task, batches(2))
    trainer.test(task, batches(3))
    trainer.predict(task, batches(4))
    kept = [line.rpartition("\r")[2] for line in stream.getvalue().split("\n")[:-1]]
    assert [re.match(r"(validation|test|predict): +\S* ?(?:\S*\| )?(\d)", line).groups() for line in kept] == [  # type: ignore[union-attr]
        ("validation", "2"), ("test", "3"), ("predict", "4"),
    ]  # fmt: skip


def test_bar_is_closed_after_an_exception() -> None:
    class Broken(Tiny):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            if batch_idx == 1:
                raise ValueError("broken")
            super().validation_step(batch, batch_idx)

    stream = Terminal()
    trainer = trainer_with(bar_on(stream))
    with pytest.raises(ValueError, match="broken"):
        trainer.fit(Broken(), batches(2), batches(2))
    assert stream.getvalue().endswith("\n")
    assert stream.drawings[-1].startswith("epoch 1/1: 100%")
    trainer.validate(Tiny(), batches(2))  # and it can be used again
    assert stream.drawings[-1].startswith("validation")


@pytest.mark.parametrize("size", [(24, 100), (0, 0)])  # the second one does not know its size
def test_a_real_terminal_is_found(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.openpty()
    termios.tcsetwinsize(writer, size)
    with os.fdopen(writer, "w") as terminal, os.fdopen(reader, "rb") as screen:
        monkeypatch.setattr(sys, "stderr", terminal)
        trainer_with(ProgressBar()).fit(Tiny(), batches(2))
        terminal.flush()
        shown = ""
        while not re.search(r"epoch 1/1: 100%\|.*2/2", shown):  # it comes in pieces
            assert select.select([screen], [], [], 10.0)[0], f"the terminal shows only {shown!r}"
            shown += os.read(screen.fileno(), 65536).decode()


def test_only_the_main_process_shows_anything() -> None:
    class Second(Callback):
        before = (ProgressBar,)

        def on_setup(self, trainer: Any, task: Any) -> None:
            trainer.process.process_index = 1

    stream = Terminal()
    trainer_with(bar_on(stream), Second()).fit(Tiny(), batches(2), batches(2))
    assert stream.getvalue() == ""


# Lines


def test_pain_38_no_bar_where_there_is_no_terminal() -> None:
    code = (
        "import torch\nfrom loopwright import Task, Trainer\n"
        "class Tiny(Task):\n"
        "    def __init__(self):\n        super().__init__(); self.net = torch.nn.Linear(1, 1)\n"
        "    def training_step(self, batch, i):\n"
        "        loss = self.net(batch).mean() * 0; self.log('loss', loss, progress_bar=True); return loss\n"
        "    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=1)\n"
        "Trainer(max_epochs=300, trackers=False).fit(Tiny(), [torch.ones(1, 1)] * 2)\n"
    )
    run = nursery().run("-c", code, timeout=100)
    assert run.returncode == 0, run.stderr
    assert "\r" not in run.stderr and "\x1b" not in run.stderr and "|" not in run.stderr
    lines = run.stderr.splitlines()
    assert 1 <= len(lines) <= 10  # 300 epochs, and no line for each of them
    assert re.fullmatch(r"epoch 300/300  batch 2/2  step 600  \S+ batches/s  left 0:00:00  loss 0", lines[-1])


def test_a_line_for_each_epoch_that_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loopwright.callbacks.progress._GAP_SECONDS", 0.0)
    assert lines_of(Tiny(), 2, val=1, max_epochs=2) == [
        "epoch 1/2  batch 2/2  step 2  loss 0.25  val 7",
        "epoch 2/2  batch 2/2  step 4  loss 0.25  val 7",
    ]


def test_short_epochs_share_a_line() -> None:
    assert lines_of(Tiny(), 2, max_epochs=20) == ["epoch 20/20  batch 2/2  step 40  loss 0.25"]


def test_an_interval_of_steps() -> None:
    assert lines_of(Tiny(), 8, every="3 steps", accumulate=2, max_epochs=2) == [
        "epoch 1/2  batch 6/8  step 3  loss 0.25",
        "epoch 2/2  batch 4/8  step 6  loss 0.25",
        "epoch 2/2  batch 8/8  step 8  loss 0.25",
    ]


def test_a_point_at_an_epochs_end_waits_for_the_validation() -> None:
    assert lines_of(Tiny(), 4, val=1, every=["2 steps", "1 epoch"]) == [
        "epoch 1/1  batch 2/4  step 2  loss 0.25",
        "epoch 1/1  batch 4/4  step 4  loss 0.25  val 7",
    ]


def test_an_interval_of_time_also_in_validation() -> None:
    lines = lines_of(Tiny(0.11), 2, val=3, every="0.1 s")
    assert lines[0] == "epoch 1/1  batch 1/2  step 1  loss 0.25"
    first = next(line for line in lines if line.startswith("validation"))
    assert first == "validation  batch 1/3  step 2  loss 0.25  val 7"
    assert lines[-1] == "epoch 1/1  batch 2/2  step 2  loss 0.25  val 7"


def test_a_line_for_an_evaluation_that_stands_alone() -> None:
    stream = io.StringIO()
    trainer_with(ProgressBar(stream=stream)).test(Tiny(), batches(3))
    assert re.fullmatch(r"test  batch 3(/3)?  \S+ batches/s  val 7\n", stream.getvalue())


def test_pace_and_time_left() -> None:
    stream = io.StringIO()
    trainer_with(ProgressBar(every="10 steps", stream=stream), max_epochs=None, max_steps=100, max_time="1 s").fit(
        Tiny(0.02), batches(20)
    )
    pace = re.search(r"step 10  ([\d.]+) batches/s  left 0:00:0(\d)", stream.getvalue().splitlines()[0])
    assert pace is not None
    assert 5 < float(pace.group(1)) <= 50  # 0.02 s and more a batch
    assert pace.group(2) in "01"  # 0.8 s of the time, which ends before the steps do


def test_the_last_line_after_an_exception() -> None:
    class Broken(Tiny):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise ValueError("broken")
            return super().training_step(batch, batch_idx)

    stream = io.StringIO()
    with pytest.raises(ValueError, match="broken"):
        trainer_with(ProgressBar(stream=stream)).fit(Broken(), batches(4))
    assert re.match(r"epoch 1/1  batch 2/4  step 2 .*loss 0.25\n$", stream.getvalue())


# Where


@pytest.mark.parametrize(("style", "start"), [("bar", "\r"), ("lines", "epoch 1/1  batch")])
def test_a_forced_style(style: Any, start: str) -> None:
    stream = io.StringIO() if style == "bar" else Terminal()
    trainer_with(ProgressBar(style=style, stream=stream)).fit(Tiny(), batches(1))
    assert stream.getvalue().startswith(start)


def test_a_notebook_is_found_without_importing_ipython(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom loopwright.callbacks.progress import _in_notebook\n"
        "assert not _in_notebook() and 'IPython' not in sys.modules\n"
        "from IPython.core.interactiveshell import InteractiveShell\nfrom traitlets.config import Config\n"
        "assert not _in_notebook()\n"
        "InteractiveShell.instance(config=Config({'IPKernelApp': {'a': 1}, 'HistoryManager': {'enabled': False}}))\n"
        "assert _in_notebook()\n"
    )
    environment = {**os.environ, "IPYTHONDIR": str(tmp_path)}
    run = nursery().run("-c", code, timeout=100, env=environment)
    assert run.returncode == 0, run.stderr


def test_without_stderr_it_trains_the_same_and_shows_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = trainer_with(ProgressBar(style="lines"))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", None)
        trainer.fit(Tiny(), batches(3), batches(2))
        assert trainer.test(Tiny(), batches(2)) == {"val": 7}
    assert trainer.state.step == 3
    assert capsys.readouterr() == ("", "")
    trainer.fit(Tiny(), batches(3))
    assert capsys.readouterr().err.startswith("epoch 1/1  batch 3/3")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"style": "line"},
            r"ProgressBar\(style='line'\) is unknown\. Did you mean 'lines'\? Accepted: auto, bar, lines",
        ),
        ({"every": "10 secs"}, r"ProgressBar\(every\)='10 secs' has an unknown unit 'secs'"),
        ({"refresh_seconds": -1}, r"ProgressBar\(refresh_seconds=-1\)\. Expected a number >= 0"),
        ({"refresh_seconds": "x"}, r"ProgressBar\(refresh_seconds='x'\)\. Expected a number >= 0"),
        ({"leave": "false"}, r"ProgressBar\(leave='false'\)\. Expected True or False"),
        ({"stream": 5}, r"ProgressBar\(stream=5\)\. Expected an open text file or sys\.stdout; leave it out"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ProgressBar(**options)
