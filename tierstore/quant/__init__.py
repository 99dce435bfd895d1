"""Expert weights in 8 or 4 bits: their layout in a record (``layout``, without torch), and products with them."""
