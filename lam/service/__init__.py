"""The HTTP service of a run: decisions with a promise behind them, and a gallery that changes while it is searched.

settings.py   the limits in force
errors.py     what a request is refused with, and the status of each kind of refusal
workers.py    threads that take what comes within a few milliseconds as one batch
images.py     from an uploaded body to an image and a thumbnail
answers.py    from hits to the decision and what it rests on, as JSON has them
engine.py     all of it behind five verbs, without HTTP
metrics.py    what is counted, for Prometheus
limits.py     size and deadline of bodies, key, host and headers, before any route is reached
models.py     what JSON holds, of requests and of answers: for checks, types and OpenAPI at once
bodies.py     from a request's body to a query
refusals.py   unknown parameters and paths, and how errors are answered
app.py        the routes
connections.py  who is connected: deadlines for headers and for reading, and how many there may be
hangups.py    SIGHUP while the service starts or ends
server.py     uvicorn around them
page/         what a browser is given: HTML, CSS and JavaScript modules, as they are

Only what reads and answers requests needs the extra `serve`; importing this package imports none of it.
"""
