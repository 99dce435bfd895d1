"""Serving models that do not fit: a store opened read only, sequences that a model continues together, and the HTTP server.

::

    config.py    what a server or ``generate`` is told
    opening.py   a store, opened read only, becomes a model whose experts are leased as its routers choose
    experts/     where leases come from: the host cache, ring memory on the device, or both in turns
    model/       a model's forward pass over tokens that follow what a cache of keys and values holds
    batch/       sequences that join and leave: one padded batch, or each with the bits that it gets alone
    text/        tokenizers, sampling, stop strings
    scheduler/   admission, limits, and the thread that runs the model
    api/         the OpenAI-compatible server and its page
"""
