//! The connection to NATS, and the two questions the pipeline asks of JetStream: "take this trigger" and "do you still
//! hold it?". Nothing that the broker answers is trusted with a turn: it can only cost latency.

use std::{sync::Arc, time::Duration};

use async_nats::{
    Client, ConnectError, ConnectErrorKind, ConnectOptions, Event, HeaderMap,
    jetstream::{self, context::PublishAckFuture, message::PublishMessage, stream::LastRawMessageErrorKind},
};
use tokio::sync::watch;

use crate::{
    settings::NatsSettings,
    trigger::{Subjects, Trigger},
};

/// How long one answer of JetStream may take.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the first connection may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest wait between two attempts to reconnect.
const RECONNECT_DELAY_MAX: Duration = Duration::from_secs(2);

/// What NATS said, without addresses' credentials and without payloads.
#[derive(Debug, Clone, thiserror::Error)]
pub enum BrokerError {
    /// The server cannot be reached.
    #[error("cannot connect to NATS at {servers}: {reason}")]
    Unreachable {
        /// The servers tried, without credentials.
        servers: String,
        /// What the client said.
        reason: String,
    },
    /// The server refused who we are; trying again will not help.
    #[error("NATS at {servers} refused the credentials: {reason}")]
    Refused {
        /// The server, without credentials.
        servers: String,
        /// What the client said.
        reason: String,
    },
    /// A file of the settings cannot be used.
    #[error("{setting}: {source}")]
    File {
        /// Which setting names it.
        setting: &'static str,
        /// Why.
        source: Arc<std::io::Error>,
    },
    /// The connection is down now.
    #[error("not connected to NATS")]
    Disconnected,
    /// No answer in time: unknown, not refused.
    #[error("NATS did not answer within {} s{}", ANSWER_TIMEOUT.as_secs(), after(.0.as_deref()))]
    Silent(Option<String>),
    /// JetStream refused.
    #[error("JetStream: {0}")]
    JetStream(String),
}

fn after(reason: Option<&str>) -> String {
    reason.map_or_else(String::new, |reason| format!("; the server said: {reason}"))
}

/// The state of the connection, as its events tell it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Link {
    /// Up now.
    pub connected: bool,
    /// Counts connections: a change means that what was asked over the former one is lost.
    pub epoch: u64,
    /// The last error that the server sent: the only place where a missing permission shows.
    pub last_error: Option<String>,
}

/// A connected client with the names of one deployment. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Broker {
    client: Client,
    jetstream: jetstream::Context,
    stream: String,
    subjects: Subjects,
    replicas: u8,
    max_bytes: Option<i64>,
    link: watch::Receiver<Link>,
}

impl Broker {
    /// Connects once and fails at once where that is refused; from then on it reconnects for ever, with backoff.
    pub async fn connect(settings: &NatsSettings, name: &str) -> Result<Self, BrokerError> {
        let (state, link) = watch::channel(Link::default());
        let options = options(settings).await?.name(name).event_callback(move |event| {
            note(&state, &event);
            std::future::ready(())
        });
        let client =
            options.connect(settings.urls.as_slice()).await.map_err(|error| refused(settings, &error))?;
        let jetstream = jetstream::ContextBuilder::new().timeout(ANSWER_TIMEOUT).build(client.clone());
        Ok(Self {
            client,
            jetstream,
            stream: settings.stream.clone(),
            subjects: Subjects::new(settings.subject_prefix.clone()),
            replicas: settings.replicas,
            max_bytes: settings.max_bytes,
            link,
        })
    }

    /// The client, for the pull loop.
    #[must_use]
    pub const fn client(&self) -> &Client {
        &self.client
    }

    /// The JetStream context, for the topology.
    #[must_use]
    pub const fn jetstream(&self) -> &jetstream::Context {
        &self.jetstream
    }

    /// The stream's name.
    #[must_use]
    pub fn stream(&self) -> &str {
        &self.stream
    }

    /// The deployment's subjects.
    #[must_use]
    pub const fn subjects(&self) -> &Subjects {
        &self.subjects
    }

    /// Copies of the stream to keep.
    #[must_use]
    pub const fn replicas(&self) -> u8 {
        self.replicas
    }

    /// The stream's size limit; `None`: unlimited.
    #[must_use]
    pub const fn max_bytes(&self) -> Option<i64> {
        self.max_bytes
    }

    /// Watches the connection.
    #[must_use]
    pub fn link(&self) -> watch::Receiver<Link> {
        self.link.clone()
    }

    /// Refuses while the connection is down, so that nothing is begun that cannot be ended.
    pub fn require_connected(&self) -> Result<(), BrokerError> {
        if self.client.connection_state() == async_nats::connection::State::Connected {
            Ok(())
        } else {
            Err(BrokerError::Disconnected)
        }
    }

    /// Sends a trigger. The answer comes with the future, whose timeout starts when it is first polled: join many, never
    /// await them in turn.
    pub async fn send(
        &self,
        subject: String,
        headers: HeaderMap,
        body: Vec<u8>,
    ) -> Result<PublishAckFuture, BrokerError> {
        let message = PublishMessage::build().payload(body.into()).headers(headers);
        within(self.jetstream.send_publish(subject, message)).await?.map_err(jetstream_error)
    }

    /// Awaits JetStream's word on a sent trigger. [`BrokerError::Silent`] means unknown: it may be stored yet.
    pub async fn acknowledged(&self, answer: PublishAckFuture) -> Result<(), BrokerError> {
        match within(async { answer.await }).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) if error.kind() == jetstream::context::PublishErrorKind::TimedOut => {
                Err(self.silent())
            }
            Ok(Err(error)) => Err(jetstream_error(error)),
            Err(_) => Err(self.silent()),
        }
    }

    /// Asks whether the last trigger on this subject is this run's: then it waits for a consumer, and all is well.
    pub async fn holds(&self, subject: &str, run: crate::ids::RunId) -> Result<bool, BrokerError> {
        self.require_connected()?;
        let stream =
            within(self.jetstream.get_stream_no_info(&self.stream)).await?.map_err(jetstream_error)?;
        match within(stream.get_last_raw_message_by_subject(subject)).await? {
            Ok(message) => Ok(Trigger::decode(&message.payload).is_ok_and(|trigger| trigger.run_id == run)),
            Err(error) if matches!(error.kind(), LastRawMessageErrorKind::NoMessageFound) => Ok(false),
            Err(error) => Err(jetstream_error(error)),
        }
    }

    /// Ends the connection: what was published is flushed, within the timeout of an answer. One that is down has nothing
    /// to wait for.
    pub async fn close(&self) {
        if self.require_connected().is_err() {
            return;
        }
        let _ = within(self.client.flush()).await;
        let _ = within(self.client.drain()).await;
    }

    fn silent(&self) -> BrokerError {
        BrokerError::Silent(self.link.borrow().last_error.clone())
    }
}

/// No await on NATS stands without a timeout: a full command queue would hold it for ever.
pub async fn within<F: Future>(answer: F) -> Result<F::Output, BrokerError> {
    // Longer than the client's own timeout, so that the client's better-named error comes first.
    let patience = ANSWER_TIMEOUT + Duration::from_secs(1);
    tokio::time::timeout(patience, answer).await.map_err(|_| BrokerError::Silent(None))
}

pub(crate) fn jetstream_error(error: impl std::error::Error) -> BrokerError {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    BrokerError::JetStream(text)
}

async fn options(settings: &NatsSettings) -> Result<ConnectOptions, BrokerError> {
    let mut options = ConnectOptions::new()
        .connection_timeout(CONNECT_TIMEOUT)
        .request_timeout(Some(ANSWER_TIMEOUT))
        .reconnect_delay_callback(|attempt| {
            let doubled = Duration::from_millis(50).saturating_mul(1 << attempt.min(10));
            doubled.min(RECONNECT_DELAY_MAX)
        });
    if let Some(path) = &settings.creds {
        options = options
            .credentials_file(path)
            .await
            .map_err(|source| BrokerError::File { setting: "NATS_CREDS", source: Arc::new(source) })?;
    }
    if let Some(path) = &settings.ca {
        options = options.add_root_certificates(path.clone());
    }
    if let (Some(cert), Some(key)) = (&settings.cert, &settings.key) {
        options = options.add_client_certificate(cert.clone(), key.clone());
    }
    Ok(options)
}

fn note(state: &watch::Sender<Link>, event: &Event) {
    match event {
        Event::Connected => tracing::info!("connected to NATS"),
        Event::Disconnected => tracing::warn!("disconnected from NATS; reconnecting"),
        Event::ServerError(error) => tracing::warn!(%error, "NATS server error"),
        Event::ClientError(error) => tracing::warn!(%error, "NATS client error"),
        _ => tracing::debug!(%event, "NATS event"),
    }
    state.send_modify(|link| match event {
        Event::Connected => {
            link.connected = true;
            link.epoch += 1;
        }
        Event::Disconnected | Event::Closed => link.connected = false,
        Event::ServerError(error) => link.last_error = Some(error.to_string()),
        _ => {}
    });
}

fn refused(settings: &NatsSettings, error: &ConnectError) -> BrokerError {
    let servers = settings.servers();
    let reason = error.to_string();
    match error.kind() {
        ConnectErrorKind::Authentication | ConnectErrorKind::AuthorizationViolation => {
            BrokerError::Refused { servers, reason }
        }
        _ => BrokerError::Unreachable { servers, reason },
    }
}
