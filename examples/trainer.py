"""transformers.Trainer over a tiered model: an optimizer and a callback; checkpoints and resuming through the store.

python examples/trainer.py MODEL_DIRECTORY STORE OUTPUT STEPS [resume]
"""

import sys

import torch
from transformers import Trainer, TrainingArguments

from tierstore.hf import TieredCallback, open_model


def main(directory: str, store: str, output: str, steps: str, *resume: str) -> None:
    arguments = TrainingArguments(
        output_dir=output,
        max_steps=int(steps),
        save_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    with open_model(store, directory, host_budget="1MiB") as tiered:
        optimizer = tiered.optimizer(arguments.learning_rate, max_grad_norm=arguments.max_grad_norm)
        starts = torch.randint(0, 128, (64,), generator=torch.Generator().manual_seed(0))
        rows = [(int(start) + torch.arange(24)) % tiered.model.config.vocab_size for start in starts]
        trainer = Trainer(
            model=tiered.model,
            args=arguments,
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            optimizers=(optimizer, None),  # None: Trainer's own schedule
            callbacks=[TieredCallback(tiered, optimizer)],
        )
        trainer.train(resume_from_checkpoint=bool(resume))
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(f"step {tiered.position}, losses {losses}")


main(*sys.argv[1:])
