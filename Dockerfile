# A CPU image that serves a run. Where torch comes from is pip's own setting, handed in as build arguments:
#
#     docker build --build-arg PIP_FIND_LINKS=... -t lam .
#     docker run --init -e LAM_API_KEY=... -p 8000:8000 -v "$PWD/runs/photographs:/data/run" lam
#
# Without one of them pip may take gigabytes of CUDA libraries. The folder of the run must be writable by user 1000.
FROM python:3.11-slim AS build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/lam
WORKDIR /source
COPY pyproject.toml setup.cfg lam_command.py constraints.txt DESCRIPTION.md LICENSE ./
COPY lam lam
RUN /opt/lam/bin/pip install -c constraints.txt '.[cpu,serve]'

FROM python:3.11-slim
RUN useradd --uid 1000 --create-home lam && mkdir /data && chown lam /data
COPY --from=build /opt/lam /opt/lam
ENV PATH=/opt/lam/bin:$PATH PYTHONUNBUFFERED=1
USER lam
WORKDIR /data
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/v1/ready', timeout=4)"]
ENTRYPOINT ["lam"]
CMD ["serve", "/data/run", "--host", "0.0.0.0"]
