"""Show what the model writes when training is done."""

from __future__ import annotations

from typing import Any

from loopwright import Callback


class WriteSample(Callback):
    """Prints a text that the model writes, on the main process, at the end of a run that went well.

    Args:
        num_bytes: how much it writes.
        prompt: how the text begins.
        temperature: below 1 prefers likely bytes.
        seed: of the sample.
    """

    after = ("ProgressBar",)  # which has drawn its last bar then

    def __init__(self, num_bytes: int = 400, prompt: str = "def ", temperature: float = 0.8, seed: int = 0) -> None:
        self.num_bytes = num_bytes
        self.prompt = prompt
        self.temperature = temperature
        self.seed = seed

    def on_fit_end(self, trainer: Any, task: Any) -> None:
        """Write the sample."""
        if trainer.error is None and trainer.process.is_main_process:
            prompt = self.prompt.encode()
            text = task.model.generate(self.num_bytes, prompt=prompt, temperature=self.temperature, seed=self.seed)
            print(f"\n--- a sample of {self.num_bytes} bytes ---\n{text.decode(errors='replace')}\n---", flush=True)
