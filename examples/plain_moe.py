"""Any MoE of your own: plain torch modules, whose experts come from a store and are stepped there.

Needs no transformers. Dense parameters stay with torch's optimizer. python examples/plain_moe.py STORE
"""

import sys

import torch
from torch import nn

from tierstore.train import ExpertSession, ExpertShape, open_experts

LAYERS, EXPERTS, TOP_K, SHAPE = 2, 16, 2, ExpertShape(d_model=32, d_ff=48)


class Mixture(nn.Module):
    """A router of ordinary parameters, and ``EXPERTS`` experts that are none: ``tiered`` is their source."""

    def __init__(self, layer: int, tiered: ExpertSession) -> None:
        super().__init__()
        self.router = nn.Linear(SHAPE.d_model, EXPERTS, bias=False)
        self.layer, self.tiered = layer, tiered

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        weight_TK, expert_TK = self.router(x_TD).softmax(-1).topk(TOP_K)
        return x_TD + self.tiered.compute(self.layer, x_TD, expert_TK, weight_TK)


def main(store: str) -> None:
    torch.manual_seed(0)
    with open_experts(store, SHAPE, layers=range(LAYERS), experts=EXPERTS, host_budget="512KiB") as tiered:
        model = nn.Sequential(*(Mixture(layer, tiered) for layer in range(LAYERS)), nn.Linear(32, 32))
        dense = torch.optim.AdamW(model.parameters(), lr=1e-2)
        x = torch.randn(256, 32)
        for number in range(40):
            with tiered.step(lr=1e-2) as step:
                loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1))
                loss.backward()
                step.clip(
                    model.parameters(), max_norm=1.0
                )  # dense and experts together; nothing moved before
            dense.step()
            dense.zero_grad()
            print(f"step {number}: loss {float(loss.detach()):.4f}")
        generation = tiered.commit()
        print(f"{LAYERS * EXPERTS} experts in commit {generation} of {store}")


main(sys.argv[1])
