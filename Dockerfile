# The cache server (and the `neffcache` command). Training images install the wheel instead: `pip install neffcache`.
FROM python:3.13-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY cache_server cache_server
COPY client client
COPY backend_hook backend_hook
COPY migrations migrations
RUN python -m venv /opt/neffcache && /opt/neffcache/bin/pip install --no-cache-dir '.[server]'

FROM python:3.13-slim
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin neffcache \
 && install -d -o neffcache -g neffcache -m 0750 /var/lib/neffcache
COPY --from=build /opt/neffcache /opt/neffcache
# Listening on every address: without a token, or a word about anonymous access, the server refuses to start.
ENV PATH=/opt/neffcache/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    NEFFCACHE_SERVER_HOST=0.0.0.0 \
    NEFFCACHE_SERVER_DATA_DIR=/var/lib/neffcache
USER 10001
VOLUME /var/lib/neffcache
EXPOSE 8765
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s --retries=3 \
  CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8765/readyz', timeout=4)"]
ENTRYPOINT ["neffcache"]
CMD ["serve"]
