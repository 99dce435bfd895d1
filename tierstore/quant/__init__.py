"""Expert weights in 8 or 4 bits: how they lie in a record, and products with them.

``layout`` and ``values`` import no torch.
"""
