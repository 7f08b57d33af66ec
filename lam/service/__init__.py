"""The HTTP service of a run: answers with promised error rates, and a gallery that changes while it is searched.

server, connections, limits, hangups    uvicorn, its connections, checks before the routes, SIGHUP
keys                                    keys with rights
tracing                                 the id, log line and OpenTelemetry spans of a request
app                                     several runs in one service, their replacement while it runs, and errors
routes/, schema                         routes, their OpenAPI schema
requests, bodies                        the JSON of requests; parsing a body into a query or an image
models                                  the JSON of answers
engine, workers, queries, watch, embedder, gallery_search, answers
                                        the service without HTTP: threads, embedding, searches, answers, feedback
settings, metrics                       limits, metrics for Prometheus
page/                                   HTML, CSS and JavaScript modules for browsers

The modules need the extra `serve`.
"""

__all__ = ["server", "settings"]
