//! The handler for agents in any language: a turn is posted to them, and their answer is the reply.
//!
//! - The request carries `Idempotency-Key: <run_id>`. An attempt is sent once; an agent, or a proxy on the way, that sees
//!   a key twice sees one attempt repeated by the network and may give the same answer again. It is the run's id, not
//!   the turn's, so that a failed attempt's answer is never replayed to the next attempt.
//! - The agent has as long as the turn has (`turn_timeout`); only connecting has a limit of its own. When the run is
//!   stopped, the connection is closed: an agent that watches for that stops too.
//! - It is asked directly: no redirect is followed, since a conversation goes where `HANDLER_URL` says, and no proxy is
//!   taken from the environment, as for Postgres and NATS.

use std::{error::Error as _, time::Duration};

use reqwest::{Client, RequestBuilder, Response, StatusCode, Url, header, redirect::Policy};
use shared::settings::HttpSettings;

use self::body::BodyError;
use crate::{
    handler::{HandlerError, Reply, Turn, TurnHandler},
    operations_api::{OperationsApi, Registered},
};

mod answer;
mod body;
mod refusal;
mod request;

/// A connection that carries nothing is closed sooner than the agent closes it: Node's and uvicorn's servers do after
/// 5 s, gunicorn's after 2 s, and a request sent into that costs an attempt.
const IDLE_TIMEOUT: Duration = Duration::from_secs(1);
/// An agent's host that vanished while it was thinking is noticed within a minute.
const KEEPALIVE: Duration = Duration::from_secs(15);

/// No request can be made at all.
#[derive(Debug, thiserror::Error)]
pub enum HttpSetupError {
    /// `HANDLER_URL` is no address.
    #[error("HANDLER_URL is not an address")]
    Url,
    /// TLS cannot be set up, for want of root certificates above all.
    #[error("requests to HANDLER_URL cannot be made: {0}")]
    Client(String),
}

/// Posts turns to an agent.
#[derive(Debug, Clone)]
pub struct HttpHandler {
    client: Client,
    url: Url,
    api: OperationsApi,
}

impl HttpHandler {
    /// Sends turns to the agent of `settings`, which records its operations with `api`.
    ///
    /// # Errors
    ///
    /// When the address is none, or no TLS client can be made for it.
    pub fn new(settings: &HttpSettings, api: OperationsApi) -> Result<Self, HttpSetupError> {
        // For the whole process, whoever comes first: reqwest brings none of its own.
        let _already_installed = rustls::crypto::ring::default_provider().install_default();
        let url: Url = settings.url.parse().map_err(|_| HttpSetupError::Url)?;
        let mut client = Client::builder()
            .user_agent(concat!("consumer/", env!("CARGO_PKG_VERSION")))
            .redirect(Policy::none())
            .no_proxy()
            .connect_timeout(settings.connect_timeout)
            .pool_idle_timeout(IDLE_TIMEOUT)
            .tcp_keepalive(KEEPALIVE)
            .tcp_keepalive_interval(KEEPALIVE)
            .tcp_keepalive_retries(3);
        if url.scheme() == "http" {
            // A host without root certificates can still do without TLS.
            client = client.tls_certs_only([]);
        }
        let client = client.build().map_err(|error| HttpSetupError::Client(cause(&error)))?;
        Ok(Self { client, url, api })
    }

    async fn ask(&self, turn: &Turn) -> Result<Reply, HandlerError> {
        // Until the answer has been recorded, and never longer than this future lives.
        let registered = self.api.register(turn.run_id, turn.operations.clone());
        let response = self.request(turn, &registered).send().await.map_err(|error| broken(&error))?;
        let status = response.status();
        if status != StatusCode::OK {
            return Err(refusal::read(response).await);
        }
        let answer = read_answer(response).await?;
        answer.record(&turn.operations).await
    }

    fn request(&self, turn: &Turn, registered: &Registered) -> RequestBuilder {
        let request = self
            .client
            .post(self.url.clone())
            .header(header::ACCEPT, "application/json")
            .header("idempotency-key", turn.run_id.to_string())
            .json(&request::Request::new(turn, registered));
        let trace = turn.trace_context.as_deref().map(header::HeaderValue::from_str);
        match trace {
            Some(Ok(trace)) => request.header("traceparent", trace),
            _ => request,
        }
    }
}

impl TurnHandler for HttpHandler {
    async fn handle(&self, turn: Turn) -> Result<Reply, HandlerError> {
        match turn.cancelled.run_until_cancelled(self.ask(&turn)).await {
            Some(answered) => answered,
            None => Err(HandlerError::retryable("the turn was stopped before the agent answered")),
        }
    }
}

async fn read_answer(response: Response) -> Result<answer::Answer, HandlerError> {
    let media_type = body::media_type(&response);
    let body = body::read(response, body::MAX_ANSWER_BYTES).await.map_err(|error| match error {
        BodyError::TooLong => HandlerError::rejected(format!(
            "the agent's answer has more than {} MiB",
            body::MAX_ANSWER_BYTES / (1024 * 1024)
        )),
        BodyError::Broken(error) => broken(&error),
    })?;
    answer::parse(&body).map_err(|misfit| {
        HandlerError::rejected(format!("the agent's answer ({media_type}) cannot be used: {misfit}"))
    })
}

/// No answer, or half of one.
fn broken(error: &reqwest::Error) -> HandlerError {
    let what = if error.is_connect() {
        "the agent could not be reached"
    } else {
        "the connection to the agent broke"
    };
    HandlerError::retryable(format!("{what}: {}", cause(error)))
}

/// The innermost cause: what the system, TLS or HTTP says, without the address, which may carry credentials.
fn cause(error: &reqwest::Error) -> String {
    let mut innermost = error.source();
    while let Some(deeper) = innermost.and_then(std::error::Error::source) {
        innermost = Some(deeper);
    }
    innermost.map_or_else(|| "no cause is known".to_owned(), ToString::to_string)
}

#[cfg(test)]
mod tests;
