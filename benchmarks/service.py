"""Requests per second and their latency over loopback, and the search alone against bare FAISS.

    python benchmarks/service.py [--items 100000] [--seconds 10] [--only beside_faiss|batches]

Closed loop: 1, 8 and 32 clients that wait for each answer, with images through convnet28 and with embeddings; 64
    clients with images through a ResNet-50; and 8 clients that open a connection for every request and close it without
    warning. Open
loop, the rows of the table of loads: requests at a fixed rate, alone and beside such connections. Client and server
    share the machine. Every measurement is limited by --seconds.

`beside_faiss` is a separate table, of 128 dimensions: vector searches of 1, 8 and 32 clients, in an exact index and in
a graph, over the rate of one thread of bare FAISS just before and after; and searches beside clients that list items.
`batches` compares one client with 64 queries in a request and with one query in a request. With --only, one of them
alone is measured, and the other results stay.
"""

import argparse
import base64
import http.client
import io
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from timing import in_process, kept, machine, write
from torch import Tensor

import lam
from lam.gallery.item import Item
from lam.gallery.store import FACTORY, FILE, ItemStore
from lam.inputs.preprocessing import Preprocessing
from lam.models import build
from lam.retrieval import Index
from lam.runs.folder import DATA, ENCODER, FORMAT, GALLERY
from lam.utils.files import seal, write_record, write_text
from lam.vmf.embeddings import Embeddings

D, K = 512, 10
SMALL_D = 128
CLIENTS = (1, 8, 32)
THREADS = 1
REPEATS = 51
CHURN = 100.0  # connections a second beside a load
BATCH = 64  # queries of a request
RETRY = 1.0  # seconds that a client in a loop waits where it was refused, as Retry-After says


def make_run(folder: Path, network: str, items: int, factory: str, dimension: int = D) -> Path:
    """A run with a random network and `items` random items in clusters, as real embeddings are."""
    generator = torch.Generator().manual_seed(0)
    small = network == "convnet28"
    preprocessing = Preprocessing(mode="L", size=(28, 28)) if small else Preprocessing.imagenet()
    assert preprocessing.shape is not None
    images = torch.rand(64, *preprocessing.shape, generator=generator)
    encoder = lam.fit(
        build(network, dimension=dimension),
        [(images, torch.arange(64) % 8)],
        margin=0.7,
        preprocessing=preprocessing,
        progress=False,
    )
    encoder.save(folder / ENCODER)
    names = ("config.yaml", "metrics.json", "report.html")
    for name in names:
        write_text(folder / name, "{}")
    write_record(folder / DATA, {"gallery": "classes", "answers": False, "parts": {}}, format=FORMAT)
    seal(folder, (*names, DATA))
    (folder / GALLERY).mkdir()
    store = ItemStore(folder / GALLERY / FILE)
    rows = (
        Item(str(row), vector.numpy().tobytes(), 50.0, "item")
        for row, vector in enumerate(clustered(items, dimension=dimension))
    )
    store.write(rows, facts={FACTORY: factory})
    store.close()
    return folder


def clustered(count: int, *, seed: int = 1, dimension: int = D) -> Tensor:
    """Unit vectors around a thousand centres, the same for every seed."""
    centres = torch.randn(1000, dimension, generator=torch.Generator().manual_seed(0)) / dimension**0.5
    noise = torch.randn(count, dimension, generator=torch.Generator().manual_seed(seed))
    return F.normalize(centres[torch.arange(count) % 1000] + 0.03 * noise, dim=1)


@contextmanager
def served(run: Path, *options: str) -> Any:
    """`lam serve` on a free port, and the seconds until it is ready."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "lam", "serve", str(run), "--port", "0", *options], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        port = int(process.stdout.readline().split(":")[-1].split(",")[0])
        while ask(http.client.HTTPConnection("127.0.0.1", port), "GET", "/v1/ready", b"", "text/plain")[0] != 200:
            time.sleep(0.02)
        yield port, time.perf_counter() - started
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def ask(connection: http.client.HTTPConnection, method: str, path: str, body: bytes, kind: str) -> tuple[int, float]:
    """Send a request: its status and seconds; a refused connection has the status 0."""
    started = time.perf_counter()
    try:
        connection.request(method, path, body, {"Content-Type": kind})
        response = connection.getresponse()
        response.read()
        return response.status, time.perf_counter() - started
    except OSError:
        connection.close()
        return 0, time.perf_counter() - started


def client(port: int, kind: str, clients: int, rate: float, limit: float) -> dict[str, Any]:
    """Send requests for `limit` seconds; with a rate, each client sends at fixed times."""
    body, path, content = bodies(kind)
    method = "GET" if kind in ("churn", "list") else "POST"
    found: list[tuple[int, float]] = []
    began = time.perf_counter()

    def run(number: int) -> None:
        connection, turn = http.client.HTTPConnection("127.0.0.1", port, timeout=60), number
        while (elapsed := time.perf_counter() - began) < limit:
            if rate:
                due = turn / rate
                if due > limit:
                    return
                time.sleep(max(0.0, due - elapsed))
                turn += clients
            found.append(ask(connection, method, path, body, content))
            if kind == "churn":
                connection.close()
            elif found[-1][0] == 503 and not rate:
                time.sleep(RETRY)
        connection.close()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken = time.perf_counter() - began
    good = sorted(latency for status, latency in found if status == 200)
    refused = sorted(latency for status, latency in found if status == 503)
    return {
        "kind": kind,
        "clients": clients,
        **({"asked_per_second": rate} if rate else {}),
        "served_per_second": round(len(good) / taken, 1),
        "p50_ms": percentile(good, 0.5),
        "p99_ms": percentile(good, 0.99),
        "statuses": {str(status): count for status, count in sorted(Counter(status for status, _ in found).items())},
        **({"refused_p99_ms": percentile(refused, 0.99)} if refused else {}),
    }


def percentile(ordered: list[float], share: float) -> float | None:
    """A percentile in milliseconds; None without values."""
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1) if ordered else None


def bodies(kind: str) -> tuple[bytes, str, str]:
    """The body of requests: a small or an ordinary image, an embedding, or nothing on a new connection."""
    path = f"/v1/search?k={K}"
    if kind == "churn":
        return b"", "/v1/health", "text/plain"
    if kind == "list":
        return b"", "/v1/items?limit=1000", "text/plain"
    if kind.startswith("batch of "):
        one = [json_query(kind.removeprefix("batch of "), seed) for seed in range(BATCH)]
        return json.dumps({"queries": one}).encode(), f"/v1/search/batch?k={K}", "application/json"
    if kind.startswith("vector"):
        return json.dumps(json_query(kind)).encode(), path, "application/json"
    return picture(28 if kind == "small image" else 500), path, "image/jpeg"


def json_query(kind: str, seed: int = 1) -> dict[str, Any]:
    """A query in JSON."""
    if kind == "small image":
        return {"image": base64.b64encode(picture(28)).decode()}
    dimension = SMALL_D if kind == "vector of 128" else D
    vector = F.normalize(torch.randn(dimension, generator=torch.Generator().manual_seed(seed)), dim=0)
    if kind == "vector in base64":
        return {"embedding": base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode(), "kappa": 50.0}
    return {"embedding": vector.tolist(), "kappa": 50.0}


def picture(side: int) -> bytes:
    """An image file of noise."""
    file = io.BytesIO()
    Image.effect_noise((side, side), 60).convert("L" if side == 28 else "RGB").save(file, "JPEG", quality=85)
    return file.getvalue()


def asked(port: int, kind: str, clients: int, limit: float, rate: float = 0.0) -> dict[str, Any]:
    """Run the client in a separate process."""
    return in_process(__file__, "--client", json.dumps([port, kind, clients, rate, limit]))


def alone_and_beside_churn(port: int, kind: str, clients: int, limit: float, rate: float) -> dict[str, Any]:
    """Requests at a rate, alone and beside clients that open and close connections."""
    alone = asked(port, kind, clients, limit, rate)
    with ThreadPoolExecutor(1) as pool:
        churn = pool.submit(asked, port, "churn", 8, limit, CHURN)
        beside = asked(port, kind, clients, limit, rate)
    return {**alone, "beside_churn": {**beside, "churn": churn.result()}}


def search_alone(items: int) -> list[dict[str, Any]]:
    """Milliseconds of FAISS alone, `Index.search` and `Gallery.search`, with one thread, on the same items and queries.

    The gallery also looks up the item of each hit in the store.
    """
    import faiss

    from lam.gallery.gallery import Gallery

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        gallery, bare = Gallery(make_run(Path(folder), "convnet28", items, "Flat") / GALLERY, D), faiss.IndexFlatIP(D)
        bare.add(clustered(items).numpy())
        for batch in (1, 8, 32):
            queries = certain(F.normalize(torch.randn(batch, D, generator=torch.Generator().manual_seed(2)), dim=1))
            mean = queries.mean.numpy()
            calls: dict[str, Callable[[], Any]] = {
                "bare": lambda: bare.search(mean, K),  # noqa: B023
                "index": lambda: gallery.index.search(queries, K),  # noqa: B023
                "gallery": lambda: gallery.search(queries, K),  # noqa: B023
            }
            measured: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(REPEATS):  # by turns, so that what else the machine does falls on all
                for name, call in calls.items():
                    measured[name].append(timed(call))
            row = {f"{name}_ms": 1000 * sorted(times)[REPEATS // 2] for name, times in measured.items()}
            ratios = {f"{name}_ratio": row["bare_ms"] / row[f"{name}_ms"] for name in ("index", "gallery")}
            rows.append({"batch": batch, **row, **ratios})
        gallery.close()
    return rows


def beside_faiss(items: int, limit: float) -> dict[str, Any]:
    """Vector searches per second, over the rate of one thread of bare FAISS in the same minute."""
    import faiss

    bare = faiss.IndexFlatIP(SMALL_D)
    bare.add(clustered(items, dimension=SMALL_D).numpy())
    query = F.normalize(torch.randn(1, SMALL_D, generator=torch.Generator().manual_seed(2)), dim=1).numpy()

    def rate_of_bare() -> float:
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < limit / 2:
            bare.search(query, K)
            count += 1
        return count / (time.perf_counter() - began)

    results: dict[str, Any] = {"dimension": SMALL_D, "items": items}
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder), "convnet28", items, "Flat", SMALL_D)
        for index in ("flat", "hnsw"):
            rows = []
            with served(run, "--index", index) as (port, _):
                for clients in CLIENTS:
                    before = rate_of_bare()
                    row = asked(port, "vector of 128", clients, limit)
                    bare_per_second = (before + rate_of_bare()) / 2
                    ratio = row["served_per_second"] / bare_per_second
                    rows.append({**row, "bare_per_second": round(bare_per_second, 1), "ratio": round(ratio, 3)})
                results[index] = rows
                if index == "flat":
                    with ThreadPoolExecutor(1) as pool:
                        lists = pool.submit(asked, port, "list", 8, limit)
                        search = asked(port, "vector of 128", 1, limit)
                        results["beside_lists"] = {**search, "lists": lists.result()}
    return results


def batches(items: int, limit: float) -> list[dict[str, Any]]:
    """Queries per second of one client: one query in a request, and 64 in a request."""
    rows = []
    for count in (items // 100, items // 10, items):
        with (
            tempfile.TemporaryDirectory() as folder,
            served(make_run(Path(folder), "convnet28", count, "Flat")) as (port, _),
        ):
            for kind in ("vector", "vector in base64", "small image"):
                alone, together = asked(port, kind, 1, limit), asked(port, f"batch of {kind}", 1, limit)
                rates = alone["served_per_second"], BATCH * together["served_per_second"]
                row = {
                    "items": count,
                    "kind": kind,
                    "one_per_second": rates[0],
                    "batched_per_second": round(rates[1], 1),
                }
                rows.append({**row, "ratio": round(rates[1] / rates[0], 2), "batch_p50_ms": together["p50_ms"]})
    return rows


def recall_of(factory: str, items: int) -> float:
    """The share of the true ten nearest that an index finds, over a thousand queries like its items."""
    found = []
    for kind in ("Flat", factory):
        index = Index(D, kind)
        index.add(certain(clustered(items)), torch.arange(items))
        found.append(index.search(certain(clustered(1000, seed=2)), K).ids)
    return float((found[1][:, :, None] == found[0][:, None, :]).any(1).double().mean())


def certain(mean: Tensor) -> Embeddings:
    """Embeddings with the same κ."""
    ones = torch.ones(len(mean))
    return Embeddings(mean, 50.0 * ones, ones, torch.zeros(len(mean)))


def timed(call: Callable[[], Any]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--only", choices=["beside_faiss", "batches"], help="measure this alone")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        print(json.dumps(client(*json.loads(given.client))))
        return
    import faiss

    torch.set_num_threads(THREADS)
    faiss.omp_set_num_threads(1)
    if given.only == "batches":
        table = {"machine": machine(), "dimension": D, "rows": batches(given.items, given.seconds)}
        write("service", {**kept("service"), "batches": table})
        return
    if given.only:
        table = {"machine": machine(), **beside_faiss(given.items, given.seconds)}
        write("service", {**kept("service"), "beside_faiss": table})
        return
    limit, results = given.seconds, {"items": given.items, "dimension": D, "search_alone": search_alone(given.items)}
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder), "convnet28", given.items, "Flat")
        with served(run) as (port, ready):
            results["flat_seconds_until_ready"] = round(ready, 2)
            results["closed_loop"] = [
                asked(port, kind, clients, limit) for kind in ("small image", "vector") for clients in CLIENTS
            ]
            results["churn"] = asked(port, "churn", 8, limit)
            results["vector_flat"] = alone_and_beside_churn(port, "vector", 16, limit, 40.0)
    results["hnsw_recall_at_10"] = recall_of("HNSW32", given.items)
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder), "convnet28", given.items, "HNSW32")
        with served(run) as (port, ready):
            results["hnsw_seconds_until_ready"] = round(ready, 2)
            results["vector_hnsw"] = alone_and_beside_churn(port, "vector", 32, limit, 200.0)
    with tempfile.TemporaryDirectory() as folder, served(make_run(Path(folder), "resnet50", 1000, "Flat")) as (port, _):
        results["image_resnet50"] = alone_and_beside_churn(port, "image", 16, limit, 8.0)
        results["image_resnet50_64_clients"] = asked(port, "image", 64, limit)
        results["image_resnet50_overload"] = alone_and_beside_churn(port, "image", 128, limit, 45.0)
    results["beside_faiss"] = beside_faiss(given.items, limit)
    results["batches"] = {"machine": machine(), "dimension": D, "rows": batches(given.items, limit)}
    write("service", results)


if __name__ == "__main__":
    main()
