# Two images from one build: `--target relay` (the default) and `--target consumer`.
FROM rust:1-bookworm AS build
WORKDIR /src
COPY . .
ENV SQLX_OFFLINE=true
RUN cargo build --locked --release -p relay -p consumer --bins

FROM debian:bookworm-slim AS base
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates \
    && rm -rf /var/lib/apt/lists/*
USER 65534:65534

FROM base AS consumer
COPY --from=build /src/target/release/consumer /usr/local/bin/
EXPOSE 9465
ENTRYPOINT ["consumer"]
CMD ["run"]

FROM base AS relay
COPY --from=build /src/target/release/relay /usr/local/bin/
EXPOSE 9464
ENTRYPOINT ["relay"]
CMD ["run"]
