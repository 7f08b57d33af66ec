"""The HTTP service of a run: answers with promised error rates, and a gallery that changes while it is searched.

server, connections, limits, hangups    uvicorn, its connections, checks before the routes, SIGHUP
keys, cors                              who may ask: keys with rights, pages of other sites
sites, served_runs                      several runs, and their exchange
tracing, request_log, spans             one request from outside: its id and stages, its line, its spans
app, routes/, schema, refusals          routes, their OpenAPI schema, errors outside of them
requests, bodies, images                JSON of requests, from a body to a query or an image
models, state_models                    JSON of answers: on items, and on the service itself
engine, workers, queries, watch, embedder, gallery_search, answers
                                        the service without HTTP: threads, an input's embedding, a search, its answer
settings, errors, metrics               limits, errors with a status, metrics for Prometheus
page/                                   HTML, CSS and JavaScript modules for browsers

The modules need the extra `serve`; importing this package does not import them.
"""

__all__ = ["server", "settings"]
