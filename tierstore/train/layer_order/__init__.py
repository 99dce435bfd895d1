"""Steps whose layers each take all micro-batches before the next one does: their passes, and what is kept between them."""
