# The service alone: no torch, no Triton, no agent. Build from the repository's root; docker-compose.yml does.
FROM python:3.13-slim AS build
WORKDIR /source
COPY pyproject.toml README.md constraints.txt ./
COPY src src
# what training alone needs stays out
RUN rm -r src/foreshock/kernels src/foreshock/monitor src/foreshock/lab src/foreshock/benchmarks \
    && python -m venv /opt/foreshock \
    && /opt/foreshock/bin/pip install --no-cache-dir --constraint constraints.txt ".[server]"

FROM python:3.13-slim
RUN groupadd --gid 10001 foreshock \
    && useradd --uid 10001 --gid 10001 --no-create-home --shell /usr/sbin/nologin foreshock \
    && install --directory --owner 10001 --group 10001 --mode 0700 /data
COPY --from=build /opt/foreshock /opt/foreshock
ENV PATH=/opt/foreshock/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
WORKDIR /data
USER 10001:10001
EXPOSE 8765
VOLUME /data
ENTRYPOINT ["foreshock", "serve"]
