"""The OpenAI-compatible HTTP server and its page. Needs the extra ``serve``.

::

    errors.py      refusals, in OpenAI's shape
    fields.py      values of a request's body, each of its type or refused by name
    parameters.py  how to sample and when to stop; what is not offered
    calls.py       bodies of /v1/completions and /v1/chat/completions
    shapes.py      the objects that are answered
    answering.py   an answer as one JSON object, or as events while it grows
    receiving.py   keys, sizes and times of what comes in
    metrics.py     what /metrics shows
    app.py         the routes
    protocol.py    connections that neither send nor take are closed
    server.py      signals, draining
    page.html      the page at /
"""
