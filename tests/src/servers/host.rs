//! The servers that one guard holds, and the orders that it obeys.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use clap::Args;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use super::{Nats, PgBouncer, Postgres, Service};
use crate::programs;

/// One of the servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Server {
    /// `PostgreSQL`.
    Postgres,
    /// nats-server.
    Nats,
    /// `PgBouncer`.
    PgBouncer,
}

/// Which servers to start, and how.
#[derive(Debug, Clone, Default, Args)]
pub struct Spec {
    /// Keep their data here; without it, it goes when they end
    #[arg(long)]
    pub home: Option<PathBuf>,
    /// Let data survive a crash of the machine, at the cost of speed
    #[arg(long)]
    pub durable: bool,
    /// Put a `PgBouncer` in front of `PostgreSQL`
    #[arg(long)]
    pub pgbouncer: bool,
    /// Directory of another `PostgreSQL`'s programs
    #[arg(long)]
    pub postgres_bin: Option<PathBuf>,
    /// Another nats-server
    #[arg(long)]
    pub nats_bin: Option<PathBuf>,
    /// Text that ends the configuration of nats-server, such as users and permissions
    #[arg(long, default_value = "")]
    pub nats_config: String,
}

impl Spec {
    /// The arguments that mean this.
    pub fn to_args(&self) -> Vec<OsString> {
        let mut args = vec![OsString::from("--nats-config"), OsString::from(&self.nats_config)];
        for (flag, wanted) in [("--durable", self.durable), ("--pgbouncer", self.pgbouncer)] {
            args.extend(wanted.then(|| flag.into()));
        }
        let paths =
            [("--home", &self.home), ("--postgres-bin", &self.postgres_bin), ("--nats-bin", &self.nats_bin)];
        for (flag, path) in paths {
            args.extend(path.iter().flat_map(|path| [flag.into(), path.into()]));
        }
        args
    }
}

/// What a guard may be told, one line of JSON each. It answers each with `Result<Addresses, String>`.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub enum Order {
    /// Stop it cleanly.
    Stop(Server),
    /// Kill it, as a crash does.
    Kill(Server),
    /// Start it after a stop or a kill, on the same port and data.
    Resume(Server),
    /// Kill NATS and start it with an empty store.
    WipeNats,
}

/// Where the servers are.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Addresses {
    /// `PostgreSQL`, without a database.
    pub postgres: String,
    /// The same server through `PgBouncer`.
    pub pgbouncer: Option<String>,
    /// nats-server.
    pub nats: String,
    /// Where they keep their data; what else is kept there goes with it.
    pub home: PathBuf,
    /// The pids of those that run.
    pub pids: Vec<u32>,
}

/// Running servers. Dropping it ends them, and removes their data unless they have a home.
#[derive(Debug)]
pub struct Host {
    postgres: Postgres,
    nats: Nats,
    pgbouncer: Option<PgBouncer>,
    home: PathBuf,
    _temporary: Option<TempDir>,
}

impl Host {
    /// Starts them.
    pub fn start(spec: &Spec) -> Result<Self> {
        let temporary = match spec.home {
            Some(_) => None,
            None => Some(tempfile::Builder::new().prefix("outbox-servers-").tempdir()?),
        };
        let home = spec.home.as_deref().or(temporary.as_ref().map(TempDir::path)).unwrap_or(Path::new("."));
        let home = std::path::absolute(home)?;
        programs::server_directory(&home)?;
        let postgres = Postgres::start(spec.postgres_bin.as_deref(), &home.join("postgres"), spec.durable)?;
        let nats = Nats::start(spec.nats_bin.as_deref(), &home.join("nats"), &spec.nats_config)?;
        let pgbouncer =
            spec.pgbouncer.then(|| PgBouncer::start(&home.join("pgbouncer"), postgres.port())).transpose()?;
        Ok(Self { postgres, nats, pgbouncer, home, _temporary: temporary })
    }

    /// Does what it is told.
    pub fn obey(&mut self, order: Order) -> Result<()> {
        match order {
            Order::Stop(server) => self.service(server)?.stop(),
            Order::Kill(server) => self.service(server)?.kill(),
            Order::Resume(server) => self.service(server)?.resume(),
            Order::WipeNats => self.nats.wipe(),
        }
    }

    /// Starts those again that have ended by themselves; returns how each ended.
    pub fn revive(&mut self) -> Result<Vec<String>> {
        let pooler = self.pgbouncer.as_mut().map(|pooler| pooler as &mut dyn Service);
        let services: [&mut dyn Service; 2] = [&mut self.postgres, &mut self.nats];
        let mut ends = Vec::new();
        for service in services.into_iter().chain(pooler) {
            let end = service.daemon().as_mut().map(super::Daemon::ended).transpose()?.flatten();
            if let Some(end) = end {
                service.resume()?;
                ends.push(end);
            }
        }
        Ok(ends)
    }

    fn service(&mut self, server: Server) -> Result<&mut dyn Service> {
        Ok(match server {
            Server::Postgres => &mut self.postgres,
            Server::Nats => &mut self.nats,
            Server::PgBouncer => self.pgbouncer.as_mut().context("these servers have no PgBouncer")?,
        })
    }

    /// Where they are.
    pub fn addresses(&mut self) -> Addresses {
        let pooler = self.pgbouncer.as_mut().and_then(|pooler| pooler.daemon().as_ref());
        let daemons = [self.postgres.daemon().as_ref(), self.nats.daemon().as_ref(), pooler];
        let pids = daemons.into_iter().flatten().map(super::Daemon::pid).collect();
        Addresses {
            postgres: self.postgres.url(),
            pgbouncer: self.pgbouncer.as_ref().map(PgBouncer::url),
            nats: self.nats.url(),
            home: self.home.clone(),
            pids,
        }
    }

    /// Stops them cleanly.
    pub fn stop(mut self) -> Result<()> {
        if let Some(pooler) = &mut self.pgbouncer {
            pooler.stop()?;
        }
        self.nats.stop()?;
        self.postgres.stop()
    }
}
