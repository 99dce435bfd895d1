"""Requests that wait for a place in the batch, and the thread that runs the model.

::

    request.py   a request, and the answer that grows beside it
    interface.py what the scheduler needs: a model that is open, and who watches it
    rates.py     how long a pass takes, and so when a client may ask again
    queue.py     admission: limits, order, draining
    opening.py   a store becomes a model that runs
    engine.py    continuous batching: join when there is room, step, leave
"""
