"""Elastic multi-task training (SE-MoE section 4.1): several tasks in one global batch, in pieces of equal cost over the
data ranks.

The rows of the global batch lie task by task. Cut into one contiguous piece for each rank, several light tasks share a
rank and a heavy one takes several, which are the paper's two ways (figures 6b and 6c). What each rank gets follows from
the configuration alone.
"""
