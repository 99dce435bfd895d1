"""The number and location of a model's parameters, for plans.

``Architecture`` counts any decoder with MoE layers; a model's specification has one. ``gpt`` counts the GPT-2/3 blocks that
the papers scale (biases, learned positions, GELU, tied embedding), ``gated`` the blocks of today's open models
(RMSNorm, SwiGLU, no biases, attention given by its parameters). D and S are the paper's names (SE-MoE section 2.1).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseUnit:
    """A group of non-expert parameters that are needed together. ``matrices``: the number cast to the compute type before
    their only use; ``others`` are used in fp32.
    """

    matrices: int
    others: int

    @property
    def numel(self) -> int:
        return self.matrices + self.others


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """``units``: groups of dense parameters that are gathered together: embedding, the blocks in order, norm and head.

    ``moe_layers``: the blocks with ``experts`` networks of ``expert_numel`` parameters, ``top_k`` of them a token.
    """

    units: tuple[DenseUnit, ...]
    moe_layers: tuple[int, ...]
    experts: int
    expert_numel: int
    top_k: int

    @property
    def blocks(self) -> int:
        return len(self.units) - 2

    @property
    def dense(self) -> int:
        """D: parameters that every token uses, routers included."""
        return sum(unit.numel for unit in self.units)

    @property
    def sparse(self) -> int:
        """S: parameters of all experts."""
        return self.expert_numel * self.experts * len(self.moe_layers)

    @property
    def parameters(self) -> int:
        """P = S + D (SE-MoE equation 2)."""
        return self.dense + self.sparse

    @property
    def active(self) -> int:
        """Parameters that one token uses."""
        return self.dense + self.expert_numel * self.top_k * len(self.moe_layers)

    @property
    def records(self) -> int:
        """Experts of the whole model."""
        return self.experts * len(self.moe_layers)

    @classmethod
    def gpt(
        cls, *, layers: int, d_model: int, vocab: int, positions: int, experts: int, moe_every: int
    ) -> Architecture:
        """GPT-2 and GPT-3 blocks (4 d wide, biases everywhere but in the router), top-1 routing.

        A block: attention 4 d^2 + 4 d, two norms 4 d; a feed-forward network, expert or not, 8 d^2 + 5 d.
        """
        d = d_model
        network = 8 * d * d + 5 * d
        moe = tuple(range(moe_every - 1, layers, moe_every)) if experts > 1 else ()
        units = [DenseUnit(matrices=0, others=(vocab + positions) * d)]
        for layer in range(layers):
            # Biases, norms and the router stay in fp32.
            own = (0, experts * d) if layer in moe else (8 * d * d, 5 * d)
            units.append(DenseUnit(matrices=4 * d * d + own[0], others=8 * d + own[1]))
        return cls(
            units=(*units, DenseUnit(matrices=0, others=2 * d)),
            moe_layers=moe,
            experts=experts if moe else 0,
            expert_numel=network,
            top_k=1,
        )

    @classmethod
    def gated(
        cls,
        *,
        layers: int,
        d_model: int,
        vocab: int,
        attention: int,
        experts: int,
        d_ff: int,
        top_k: int,
        shared_d_ff: int = 0,
        dense_layers: tuple[int, ...] = (),
        dense_d_ff: int = 0,
    ) -> Architecture:
        """SwiGLU blocks with two RMSNorms and untied embeddings; ``attention`` parameters a block, its inner norms
        included. ``dense_layers`` have one network of width ``dense_d_ff`` instead of experts.
        """
        d = d_model
        units = [DenseUnit(matrices=0, others=vocab * d)]
        for layer in range(layers):
            if layer in dense_layers:
                units.append(DenseUnit(matrices=attention + 3 * d * dense_d_ff, others=2 * d))
            else:
                units.append(DenseUnit(matrices=attention + 3 * d * shared_d_ff, others=2 * d + experts * d))
        moe = tuple(layer for layer in range(layers) if layer not in dense_layers)
        return cls(
            units=(*units, DenseUnit(matrices=0, others=vocab * d + d)),
            moe_layers=moe,
            experts=experts,
            expert_numel=3 * d * d_ff,
            top_k=top_k,
        )
