//! Where an agent behind HTTP records its tool calls, each before it is made: the remote form of
//! [`Operations`], with its promises.
//!
//! | call | answer |
//! |---|---|
//! | `POST <operations_url>` `{name, effect, input}` | 201 `{id, idempotency_key}`: call the tool now |
//! | `PATCH <operations_url>/<id>` `{status: completed\|failed, output}` | 200 `{id, status}` |
//!
//! Both take `Authorization: Bearer <operations_token>`. Anything else than 201 means that the tool must not be called.
//! Refusals are `{error: {message, retryable}}`, and `field` where one is to blame: 401 no run has this token · 404 no
//! such operation · 409 the run has lost its lane, was cancelled or is over, or the operation has ended · 408, 413 and
//! 422 the body is late, too large or wrong · 503 Postgres could not be asked, so nobody knows whether the operation
//! was recorded: repeat the call, and call no tool before a 201.
//!
//! A token is good while its run runs. The last thousand that ended are remembered, so that a late agent is told that
//! its run is over, which it can act on, and not that its token is wrong.

use std::{
    collections::{HashMap, VecDeque},
    fmt,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use shared::{
    admin::Router,
    ids::{OperationsToken, RunId},
    settings::HttpSettings,
};

use crate::operations::Operations;

pub(crate) mod fields;
mod refusal;
mod routes;

/// Ended runs that are remembered.
const REMEMBERED: usize = 1000;

/// The agent could not call back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the agent cannot reach the operations at {0} (ADMIN_ADDR): set OPERATIONS_URL to an address of this consumer"
)]
pub struct NoAddress(SocketAddr);

/// The runs whose agents may call back. Clones share them.
#[derive(Clone)]
pub struct OperationsApi(Arc<Inner>);

struct Inner {
    base: String,
    runs: Mutex<Runs>,
}

#[derive(Default)]
struct Runs {
    running: HashMap<RunId, (OperationsToken, Operations)>,
    ended: VecDeque<(RunId, OperationsToken)>,
}

/// What a token is good for.
enum Access {
    Granted(Operations),
    RunEnded,
    Denied,
}

/// One run's address and token, good until this is dropped.
#[must_use = "the token is refused from the time that this is dropped"]
pub struct Registered {
    /// Where the agent posts its operations.
    pub url: String,
    /// What it shows.
    pub token: OperationsToken,
    api: OperationsApi,
    run_id: RunId,
}

impl OperationsApi {
    /// Tells agents `operations_url`, or else `admin`, the address at which [`routes`](Self::routes) are served.
    ///
    /// # Errors
    ///
    /// When there is no `operations_url` and `admin` means every address of this host, which is nobody's address.
    pub fn new(settings: &HttpSettings, admin: SocketAddr) -> Result<Self, NoAddress> {
        let base = match &settings.operations_url {
            Some(url) => url.trim_end_matches('/').to_owned(),
            None if admin.ip().is_unspecified() => return Err(NoAddress(admin)),
            None => format!("http://{admin}"),
        };
        Ok(Self(Arc::new(Inner { base, runs: Mutex::default() })))
    }

    /// What the admin server answers for agents, under `/v1/runs`.
    pub fn routes(&self) -> Router {
        routes::routes(self.clone())
    }

    /// Lets the agent of this run in, by a token of its own, until the guard is dropped.
    pub fn register(&self, run_id: RunId, operations: Operations) -> Registered {
        let token = OperationsToken::fresh();
        self.runs().running.insert(run_id, (token.clone(), operations));
        Registered {
            url: format!("{}/v1/runs/{run_id}/operations", self.0.base),
            token,
            api: self.clone(),
            run_id,
        }
    }

    fn access(&self, run_id: RunId, presented: &str) -> Access {
        let runs = self.runs();
        match runs.running.get(&run_id) {
            Some((token, operations)) if token.matches(presented) => Access::Granted(operations.clone()),
            _ if runs.ended.iter().any(|(ended, token)| *ended == run_id && token.matches(presented)) => {
                Access::RunEnded
            }
            _ => Access::Denied,
        }
    }

    /// A thread that panicked while it held the lock left whole collections behind: each write is a single one.
    fn runs(&self) -> MutexGuard<'_, Runs> {
        self.0.runs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let mut runs = self.api.runs();
        // A run that was registered anew belongs to the newer guard.
        if runs.running.get(&self.run_id).is_some_and(|(token, _)| token.matches(self.token.reveal())) {
            runs.running.remove(&self.run_id);
        }
        if runs.ended.len() == REMEMBERED {
            runs.ended.pop_front();
        }
        runs.ended.push_back((self.run_id, self.token.clone()));
    }
}

impl fmt::Debug for OperationsApi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OperationsApi").field("base", &self.0.base).finish_non_exhaustive()
    }
}

impl fmt::Debug for Registered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registered").field("url", &self.url).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
