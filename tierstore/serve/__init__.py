"""Serving models that do not fit: a store opened read only, sequences that a model continues together, and the HTTP server.

::

    config.py      how a store is served
    opening.py     a store becomes a model that is served
    footprint.py   memory: budgets for experts, dense parameters, keys and values
    planning.py    what serving takes and how fast it is, predicted
    experts/       where leases come from: the host cache, ring memory on the device, or chosen experts in turns with it
    dense.py       dense parameters: loaded, computed in quick products or in compiled graphs
    model.py       a model's forward pass over tokens that follow what a cache of keys and values holds
    batch.py       sequences that join and leave: one padded batch, or each with the bits that it gets alone
    language.py    text to tokens and back; stop strings
    sampling.py    which token follows
    generating.py  texts continued one after another as there is room: ``tierstore generate``
    admission.py   requests, their answers, and the queue
    engine.py      the thread that runs the model
    api/           the OpenAI-compatible server and its page
"""
