"""The HTTP service of a run: answers with promised error rates, and a gallery that changes while it is searched.

server, connections, limits, hangups    uvicorn, its connections, checks before the routes, SIGHUP
keys, cors                              who may ask: keys with rights, pages of other sites
sites, served_runs                      several runs, and their exchange
tracing, request_log, spans             one request from outside: its id and stages, its line, its spans
app, refusals, bodies, models, images   routes, their errors, bodies of requests, JSON of requests and answers, images
engine, workers, embedder, gallery_search, answers
                                        the service without HTTP: threads, an input's embedding, a search, its answer
settings, errors, metrics               limits, errors with a status, metrics for Prometheus
page/                                   HTML, CSS and JavaScript modules for browsers

The modules need the extra `serve`; importing this package does not import them.
"""

__all__ = ["server", "settings"]
