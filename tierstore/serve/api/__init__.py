"""The OpenAI-compatible HTTP server and its page. Needs the extra ``serve``.

::

    bodies.py   request bodies, validated field by field
    answers.py  an answer as one JSON object, or as events while it grows
    app.py      the routes; API keys, limits on the size and time of request bodies
    metrics.py  the metrics of /metrics
    server.py   signals, draining, connection limits
    page.html   the page at /
"""
