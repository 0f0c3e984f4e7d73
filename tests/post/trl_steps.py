"""A program: ten steps of trl's trainers on a model and rows of a folder, whose losses it writes there.

python trl_steps.py FOLDER sft|dpo
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, ClassVar

from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

CONFIGS: dict[str, Any] = {"sft": (SFTConfig, SFTTrainer), "dpo": (DPOConfig, DPOTrainer)}


def main(folder: Path, kind: str) -> None:
    settings = json.loads((folder / f"{kind}.json").read_text())
    make_config, make_trainer = CONFIGS[kind]

    class InOrder(make_trainer):
        """Rows come as they are, and losses are kept as they are."""

        losses: ClassVar[list[float]] = []

        def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

        def training_step(self, *given: Any, **named: Any) -> Any:
            loss = super().training_step(*given, **named)
            self.losses.append(float(loss))
            return loss

    trainer = InOrder(
        model=str(folder / "theirs"),
        args=make_config(
            output_dir=str(folder / f"trl-{kind}"),
            num_train_epochs=1,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            weight_decay=0.0,
            optim="adamw_torch",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **settings["config"],
        ),
        train_dataset=Dataset.from_list(settings["rows"]),
        processing_class=AutoTokenizer.from_pretrained(folder / "theirs"),
    )
    trainer.train()
    (folder / f"{kind}.found.json").write_text(json.dumps(trainer.losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
