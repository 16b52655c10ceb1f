//! Connections to Postgres that cannot hurt anybody: bounded in number, named, with timeouts on statements, locks and
//! idle transactions, and with a planner that can only choose the index that a statement was written for.

use std::{str::FromStr, time::Duration};

use sqlx::{
    ConnectOptions, Connection, PgPool,
    postgres::{PgConnectOptions, PgPoolOptions},
};

use crate::settings::DatabaseSettings;

/// How long a caller waits for a free connection.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(5);

/// Why there is no pool.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// `DATABASE_URL` is no Postgres address.
    #[error("DATABASE_URL is not a valid Postgres address")]
    Address(#[source] sqlx::Error),
    /// The server cannot be reached, or refused the connection.
    #[error("cannot connect to Postgres at {server}: {}", crate::sqlstate::safe_text(.source))]
    Unreachable {
        /// Host and port.
        server: String,
        /// What the driver said.
        source: sqlx::Error,
    },
}

/// What the sessions of the pipeline run with.
///
/// Every statement of the hot path is a nested loop over index scans. Plans that were made while the tables were empty
/// must not turn to sequential scans when they have grown, and dead index entries must not make a sort look cheap, so the
/// alternatives are off. Statements never wait for each other for long: a lock that a stopped client holds costs 5 s.
const SESSION: [(&str, &str); 13] = [
    ("statement_timeout", "30s"),
    ("lock_timeout", "5s"),
    ("idle_in_transaction_session_timeout", "30s"),
    ("tcp_keepalives_idle", "15"),
    ("tcp_keepalives_interval", "5"),
    ("tcp_keepalives_count", "3"),
    ("enable_seqscan", "off"),
    ("enable_bitmapscan", "off"),
    ("enable_hashjoin", "off"),
    ("enable_mergejoin", "off"),
    ("enable_sort", "off"),
    ("jit", "off"),
    ("plan_cache_mode", "force_generic_plan"),
];

/// Options for one of our sessions, named `application` in `pg_stat_activity`.
pub fn options(settings: &DatabaseSettings, application: &str) -> Result<PgConnectOptions, ConnectError> {
    let options = PgConnectOptions::from_str(&settings.url).map_err(ConnectError::Address)?;
    Ok(options
        .application_name(application)
        .options(SESSION)
        // A failed statement is reported once, by who handles it; the driver's log would quote values.
        .disable_statement_logging())
}

/// Opens one connection for migrations, which may wait and work as long as they need.
pub async fn connect_to_migrate(settings: &DatabaseSettings) -> Result<PgPool, ConnectError> {
    let options = PgConnectOptions::from_str(&settings.url).map_err(ConnectError::Address)?;
    open(options.application_name("relay migrate").disable_statement_logging(), 1).await
}

/// Opens a pool of at most `max_connections` and proves it with one connection.
pub async fn connect(
    settings: &DatabaseSettings,
    application: &str,
    max_connections: u32,
) -> Result<PgPool, ConnectError> {
    open(options(settings, application)?, max_connections).await
}

async fn open(options: PgConnectOptions, max_connections: u32) -> Result<PgPool, ConnectError> {
    let server = format!("{}:{}", options.get_host(), options.get_port());
    // Once by itself: a pool tries again until its timeout, and then says only that the time is over.
    let first = tokio::time::timeout(ACQUIRE_TIMEOUT, options.connect())
        .await
        .unwrap_or_else(|_| Err(sqlx::Error::Io(std::io::ErrorKind::TimedOut.into())));
    match first {
        Ok(connection) => drop(connection.close().await),
        Err(source) => return Err(ConnectError::Unreachable { server, source }),
    }
    Ok(PgPoolOptions::new()
        .max_connections(max_connections)
        .acquire_timeout(ACQUIRE_TIMEOUT)
        .connect_lazy_with(options))
}
