"""accelerate over a tiered model: accumulate, a schedule, and checkpoints that belong to commits of the store.

python examples/accelerated.py MODEL_DIRECTORY STORE CHECKPOINT
"""

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from tierstore.hf import open_model


def main(directory: str, store: str, checkpoint: str) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    starts = torch.randint(0, 128, (32,), generator=torch.Generator().manual_seed(0))
    with open_model(store, directory, host_budget="1MiB") as tiered:
        loader = DataLoader([(int(start) + torch.arange(24)) % 128 for start in starts], batch_size=2)
        # accelerator.clip_grad_norm_ would see no gradients: the optimizer clips, all of them together.
        optimizer = tiered.optimizer(3e-3, max_grad_norm=1.0)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=8)
        model = tiered.model.train()  # not prepared: its weights are the store's to save
        optimizer, loader, schedule = accelerator.prepare(optimizer, loader, schedule)
        accelerator.register_for_checkpointing(tiered)  # commits, and saves where the store stands
        for tokens in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            print(f"loss {float(loss.detach()):.4f}")
        accelerator.save_state(checkpoint)  # no weights: it belongs to a commit of the store
        accelerator.load_state(checkpoint)  # and another would be refused
        print(f"step {tiered.position}, learning rate {schedule.get_last_lr()[0]:.2e}")


main(*sys.argv[1:])
