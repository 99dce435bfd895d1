"""Your model, your loop: a transformers MoE whose experts live in a store, fine-tuned in a memory budget.

python examples/own_loop.py MODEL_DIRECTORY STORE        the store is made of the model directory if there is none
"""

import sys

import torch

from tierstore.hf import open_model

STEPS, MICRO_BATCHES = 8, 2


def batches(vocabulary: int) -> torch.Tensor:
    """Stands for a loader: sequences that count up, (steps, micro-batches, rows, tokens)."""
    starts = torch.randint(
        0, vocabulary, (STEPS, MICRO_BATCHES, 2, 1), generator=torch.Generator().manual_seed(0)
    )
    return (starts + torch.arange(24)) % vocabulary


def main(directory: str, store: str) -> None:
    with open_model(store, directory, host_budget="1MiB") as tiered:
        model = tiered.model  # MixtralForCausalLM, Qwen3MoeForCausalLM, ...: transformers' own class
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        for micro_batches in batches(model.config.vocab_size):
            with tiered.step(lr=3e-3, max_grad_norm=1.0) as step:  # opens before the first forward pass
                for tokens in micro_batches:
                    loss = model(input_ids=tokens, labels=tokens).loss
                    step.backward(loss / MICRO_BATCHES)
            print(f"loss {step.loss:.4f}, gradient norm {step.grad_norm:.3f}")
        tiered.commit()  # from here on a crash loses nothing
        model.eval()
        prompt = torch.arange(8).unsqueeze(0)
        text = model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
        print(f"committed at step {tiered.position}; after {prompt[0].tolist()}: {text[0, 8:].tolist()}")


main(*sys.argv[1:])
