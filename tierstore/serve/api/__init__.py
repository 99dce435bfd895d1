"""The OpenAI-compatible HTTP server and its page. Needs the extra ``serve``.

::

    bodies.py   bodies of requests: every field of its type, or refused by name
    answers.py  an answer as one JSON object, or as events while it grows
    app.py      the routes; keys, sizes and times of what comes in
    metrics.py  what /metrics shows
    server.py   signals, draining, limits of connections
    page.html   the page at /
"""
