"""From a store to a checkpoint, or to an adapter of peft's."""
