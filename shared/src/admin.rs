//! What a process tells its operators: is it alive, is it ready and if not why, which version is it.
//!
//! Readiness is a set of named checks that the parts of the process keep up to date themselves, so that asking costs
//! nothing and tests nothing. Ages come from the monotonic clock.

use std::{
    collections::BTreeMap,
    fmt, io,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use axum::Json;
pub use axum::Router;
use axum::{extract::State, http::StatusCode, routing::get};
use serde::Serialize;
use tokio::{net::TcpListener, time};
use tokio_util::sync::CancellationToken;

use crate::settings::AdminSettings;

/// How long answers that are under way may take once the server was told to stop.
const GRACE: Duration = Duration::from_secs(1);

/// The admin server cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    /// The address is taken, or not ours.
    #[error("cannot listen on {addr} (ADMIN_ADDR)")]
    Bind {
        /// The address of the settings.
        addr: SocketAddr,
        /// What the system says.
        #[source]
        source: io::Error,
    },
    /// The listener failed.
    #[error("the admin server failed")]
    Serve(#[source] io::Error),
}

/// Whether the process can do its work, check by check. Clones share the checks.
#[derive(Debug, Clone, Default)]
pub struct Readiness {
    checks: Arc<Mutex<BTreeMap<&'static str, Check>>>,
    stop: CancellationToken,
}

#[derive(Debug)]
struct Check {
    /// Why it fails; `None`: it does not.
    why: Option<String>,
    since: Instant,
}

/// One look at a [`Readiness`], as `/readyz` answers it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// There are checks, every one passes, and the process is not stopping.
    pub ready: bool,
    /// The process was told to stop.
    pub stopping: bool,
    /// The checks by name.
    pub checks: BTreeMap<&'static str, CheckReport>,
}

/// One check of a [`Report`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CheckReport {
    /// Whether it passes.
    pub ok: bool,
    /// For how many milliseconds it has been passing, or failing.
    pub since_ms: u64,
    /// Why it fails.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

impl Readiness {
    /// No checks yet, and so not ready yet. From the time that `stop` is cancelled the process is not ready, whatever they say.
    #[must_use]
    pub fn new(stop: CancellationToken) -> Self {
        Self { checks: Arc::default(), stop }
    }

    /// Adds a check that fails until it is first [set ready](Self::set_ready).
    pub fn register(&self, check: &'static str) {
        self.set_not_ready(check, "not yet known");
    }

    /// The check passes.
    pub fn set_ready(&self, check: &'static str) {
        self.set(check, None);
    }

    /// The check fails, because of `why`: a text for operators, without anything that users wrote.
    pub fn set_not_ready(&self, check: &'static str, why: impl fmt::Display) {
        self.set(check, Some(why.to_string()));
    }

    /// How things stand now.
    #[must_use]
    pub fn report(&self) -> Report {
        let stopping = self.stop.is_cancelled();
        let checks: BTreeMap<_, _> =
            self.checks().iter().map(|(name, check)| (*name, check.report())).collect();
        let all_pass = !checks.is_empty() && checks.values().all(|check| check.ok);
        Report { ready: !stopping && all_pass, stopping, checks }
    }

    fn set(&self, name: &'static str, why: Option<String>) {
        let mut checks = self.checks();
        let check = checks.entry(name).or_insert_with(|| Check { why: why.clone(), since: Instant::now() });
        if check.why.is_some() != why.is_some() {
            check.since = Instant::now();
            match &why {
                None => tracing::info!(check = name, "ready"),
                Some(why) => tracing::warn!(check = name, why, "not ready"),
            }
        }
        check.why = why;
    }

    /// A thread that panicked while it held the lock left a whole map behind: each write is a single one.
    fn checks(&self) -> MutexGuard<'_, BTreeMap<&'static str, Check>> {
        self.checks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Check {
    fn report(&self) -> CheckReport {
        let since_ms = u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX);
        CheckReport { ok: self.why.is_none(), since_ms, why: self.why.clone() }
    }
}

/// Takes the address, before anything else starts; [`TcpListener::local_addr`] has the port when it was 0.
///
/// # Errors
///
/// When the address cannot be bound.
pub async fn bind(settings: &AdminSettings) -> Result<TcpListener, AdminError> {
    let failed = |source| AdminError::Bind { addr: settings.addr, source };
    let listener = TcpListener::bind(settings.addr).await.map_err(failed)?;
    tracing::info!(addr = %listener.local_addr().map_err(failed)?, "admin server listens");
    Ok(listener)
}

/// Answers `/livez`, `/readyz`, `/version` and the routes of `extra`, until `stop`.
///
/// # Errors
///
/// When the listener fails.
pub async fn serve(
    listener: TcpListener,
    readiness: Readiness,
    extra: Router,
    stop: CancellationToken,
) -> Result<(), AdminError> {
    let server = axum::serve(listener, routes(readiness).merge(extra))
        .with_graceful_shutdown(stop.clone().cancelled_owned())
        .into_future();
    let too_late = async {
        stop.cancelled().await;
        time::sleep(GRACE).await;
    };
    tokio::select! {
        result = server => result.map_err(AdminError::Serve),
        () = too_late => Ok(()),
    }
}

fn routes(readiness: Readiness) -> Router {
    Router::new()
        .route("/livez", get(async || "alive\n"))
        .route("/version", get(async || Json(serde_json::json!({ "version": env!("CARGO_PKG_VERSION") }))))
        .route("/readyz", get(readyz))
        .with_state(readiness)
}

async fn readyz(State(readiness): State<Readiness>) -> (StatusCode, Json<Report>) {
    let report = readiness.report();
    let status = if report.ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(report))
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpStream,
    };

    use super::*;

    async fn answer(addr: SocketAddr, path: &str) -> String {
        let mut connection = TcpStream::connect(addr).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nhost: admin\r\nconnection: close\r\n\r\n");
        connection.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        connection.read_to_string(&mut answer).await.unwrap();
        answer
    }

    #[test]
    fn ready_is_when_every_check_passes_and_nobody_said_stop() {
        let stop = CancellationToken::new();
        let readiness = Readiness::new(stop.clone());
        assert!(!readiness.report().ready, "nothing is known yet");
        readiness.register("broker");
        readiness.set_ready("database");
        assert!(!readiness.report().ready);
        readiness.clone().set_ready("broker");
        assert!(readiness.report().ready);
        readiness.set_not_ready("broker", "the stream is full");
        assert_eq!(readiness.report().checks["broker"].why.as_deref(), Some("the stream is full"));
        readiness.set_ready("broker");
        stop.cancel();
        assert!(!readiness.report().ready && readiness.report().stopping);
    }

    #[test]
    fn a_check_that_keeps_failing_keeps_its_age() {
        let readiness = Readiness::default();
        readiness.set_not_ready("broker", "no connection");
        let since = readiness.checks()["broker"].since;
        readiness.set_not_ready("broker", "no stream");
        assert_eq!(readiness.checks()["broker"].since, since);
    }

    #[tokio::test]
    async fn the_server_answers_with_the_extra_routes_until_it_is_stopped() {
        let settings = AdminSettings { addr: (Ipv4Addr::LOCALHOST, 0).into() };
        let listener = bind(&settings).await.unwrap();
        let addr = listener.local_addr().unwrap();
        let (readiness, stop) = (Readiness::default(), CancellationToken::new());
        let extra = Router::new().route("/extra", get(async || "more"));
        let served = tokio::spawn(serve(listener, readiness.clone(), extra, stop.clone()));

        assert!(answer(addr, "/livez").await.starts_with("HTTP/1.1 200"));
        assert!(answer(addr, "/extra").await.ends_with("more"));
        assert!(answer(addr, "/version").await.contains(env!("CARGO_PKG_VERSION")));
        readiness.set_not_ready("database", "no connection");
        let not_ready = answer(addr, "/readyz").await;
        assert!(
            not_ready.starts_with("HTTP/1.1 503") && not_ready.contains(r#""why":"no connection""#),
            "{not_ready}"
        );

        stop.cancel();
        served.await.unwrap().unwrap();
    }
}
