"""Serve models larger than memory: a store opened read only, batched generation, and the HTTP server.

::

    config.py      configuration of serving
    opening.py     opens a store as a served model
    footprint.py   memory: budgets for experts, dense parameters, keys and values
    planning.py    predicts the memory and the speed of serving
    experts.py     sources of experts: the host cache, or device slots with chosen experts or a ring of whole layers
    dense.py       dense parameters: loading, fast products of few rows, compiled graphs
    model.py       forward passes with a cache of keys and values
    batch.py       sequences that join and leave: one padded batch, or batch-invariant passes
    passes.py      forward passes side by side, which meet at the experts; sequences divided over ranks
    language.py    text to tokens and back; stop strings
    sampling.py    chooses the next token
    generating.py  continues texts as the batch has room: ``tierstore generate``
    admission.py   requests, their answers, and the queue
    engine.py      the thread that runs the model
    api/           the OpenAI-compatible server and its page
"""
