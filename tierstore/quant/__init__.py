"""Expert weights in 8 or 4 bits: how they lie in a record (``layout``, without torch), and products with them."""
