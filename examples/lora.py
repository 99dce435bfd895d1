"""LoRA: pairs on attention, by peft, beside frozen weights (2 bytes a parameter in bf16); out as a peft adapter.

python examples/lora.py MODEL_DIRECTORY STORE ADAPTER        targets: attention here; or experts, or both
"""

import sys
from pathlib import Path

import torch

from tierstore.hf import export_adapter, open_model

SETTINGS = {"lora.rank": 8, "lora.targets": "attention", "lora.modules": ("q_proj", "v_proj")}


def main(directory: str, store: str, adapter: str) -> None:
    with open_model(store, directory, host_budget="1MiB", settings=SETTINGS) as tiered:
        model = tiered.model
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        print(f"{len(trained)} parameters are trained: {trained[0]} to {trained[-1]}")
        model.train()
        starts = torch.randint(0, 128, (16, 4, 1), generator=torch.Generator().manual_seed(0))
        for tokens in (starts + torch.arange(24)) % model.config.vocab_size:
            with tiered.step(lr=1e-2, max_grad_norm=1.0) as step:
                step.backward(model(input_ids=tokens, labels=tokens).loss)
            print(f"loss {step.loss:.4f}")
        tiered.commit()
    export_adapter(Path(store), Path(adapter))
    print(f"adapter for {directory}: {sorted(path.name for path in Path(adapter).iterdir())}")


main(*sys.argv[1:])
