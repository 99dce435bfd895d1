"""From a checkpoint to a store."""
