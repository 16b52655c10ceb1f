//! The stream and the durable consumers: made once, created strictly, and never silently changed. A differing one is
//! somebody's decision; it is reported, not fought.

use std::time::Duration;

use async_nats::jetstream::{
    ErrorCode,
    consumer::{self, AckPolicy, DeliverPolicy, pull},
    context::{CreateStreamErrorKind, GetStreamErrorKind},
    stream::{Config, DiscardPolicy, RetentionPolicy, StorageType, Stream},
};

use crate::{
    broker::{Broker, BrokerError, jetstream_error, within},
    ids::AgentName,
};

/// An ack follows the begin within milliseconds, so a trigger lost with its receiver comes back soon.
const ACK_WAIT: Duration = Duration::from_secs(2);
/// Triggers delivered and not begun yet, over all consumers of an agent. An ack never waits for a turn, so this bounds a
/// burst and starves nobody.
const MAX_ACK_PENDING: i64 = 65_536;

/// Something that exists otherwise than this code would make it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// The stream or the durable.
    pub of: String,
    /// Which setting.
    pub setting: &'static str,
    /// As the server has it.
    pub found: String,
    /// As this code would make it.
    pub wanted: String,
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { of, setting, found, wanted } = self;
        write!(f, "{of}: {setting} is {found}, wanted {wanted}")
    }
}

/// The durable consumer of one agent.
#[must_use]
pub fn durable(agent: &AgentName) -> String {
    format!("workers-{agent}")
}

/// Makes the stream, and one durable for each of these agents, where they are missing. Returns what exists otherwise.
pub async fn ensure(broker: &Broker, agents: &[AgentName]) -> Result<Vec<Difference>, BrokerError> {
    let (stream, mut differences) = ensure_stream(broker).await?;
    for agent in agents {
        differences.extend(ensure_durable(broker, &stream, agent).await?);
    }
    Ok(differences)
}

async fn ensure_stream(broker: &Broker) -> Result<(Stream, Vec<Difference>), BrokerError> {
    let wanted = stream_config(broker);
    let jetstream = broker.jetstream();
    // Asked for again where another process made it between the question and the making.
    for _ in 0..2 {
        match within(jetstream.get_stream(broker.stream())).await? {
            Ok(stream) => {
                let found = stream.cached_info().config.clone();
                return Ok((stream, stream_differences(&found, &wanted)));
            }
            Err(error) if is_missing(&error.kind()) => {}
            Err(error) => return Err(jetstream_error(error)),
        }
        match within(jetstream.create_stream(wanted.clone())).await? {
            Ok(stream) => {
                let found = stream.cached_info().config.clone();
                return Ok((stream, stream_differences(&found, &wanted)));
            }
            Err(error) if made_meanwhile(&error.kind()) => {}
            Err(error) => return Err(jetstream_error(error)),
        }
    }
    Err(BrokerError::JetStream(format!("stream {} appears and disappears", broker.stream())))
}

/// The same "not found" comes during a leader election, but then with another code than this one.
fn is_missing(kind: &GetStreamErrorKind) -> bool {
    matches!(kind, GetStreamErrorKind::JetStream(error) if error.error_code() == ErrorCode::STREAM_NOT_FOUND)
}

fn made_meanwhile(kind: &CreateStreamErrorKind) -> bool {
    matches!(kind, CreateStreamErrorKind::JetStream(error) if error.error_code() == ErrorCode::STREAM_NAME_EXIST)
}

fn stream_config(broker: &Broker) -> Config {
    Config {
        name: broker.stream().to_owned(),
        subjects: vec![broker.subjects().all()],
        retention: RetentionPolicy::WorkQueue,
        storage: StorageType::File,
        discard: DiscardPolicy::New,
        max_bytes: broker.max_bytes().unwrap_or(-1),
        num_replicas: usize::from(broker.replicas()),
        description: Some("Triggers of agent turns: ids only".into()),
        ..Config::default()
    }
}

fn stream_differences(found: &Config, wanted: &Config) -> Vec<Difference> {
    let mut differences = Differences::of(format!("stream {}", wanted.name));
    differences.compare("subjects", &found.subjects, &wanted.subjects);
    differences.compare("retention", &found.retention, &wanted.retention);
    differences.compare("storage", &found.storage, &wanted.storage);
    differences.compare("discard", &found.discard, &wanted.discard);
    differences.compare("max_bytes", &found.max_bytes, &wanted.max_bytes);
    differences.compare("max_age", &found.max_age, &wanted.max_age);
    differences.compare("num_replicas", &found.num_replicas, &wanted.num_replicas);
    differences.list
}

async fn ensure_durable(
    broker: &Broker,
    stream: &Stream,
    agent: &AgentName,
) -> Result<Vec<Difference>, BrokerError> {
    let name = durable(agent);
    let wanted = durable_config(broker, agent);
    if let Ok(existing) = within(stream.get_consumer::<pull::Config>(&name)).await? {
        return Ok(durable_differences(&existing.cached_info().config, &wanted));
    }
    // Strictly: where another process made it meanwhile, an equal one is accepted and a differing one refused.
    match within(stream.create_consumer_strict(wanted)).await? {
        Ok(_) => Ok(Vec::new()),
        Err(error) => Err(jetstream_error(error)),
    }
}

fn durable_config(broker: &Broker, agent: &AgentName) -> pull::Config {
    pull::Config {
        durable_name: Some(durable(agent)),
        filter_subject: broker.subjects().of_agent(agent),
        deliver_policy: DeliverPolicy::All,
        ack_policy: AckPolicy::Explicit,
        ack_wait: ACK_WAIT,
        max_deliver: -1,
        max_ack_pending: MAX_ACK_PENDING,
        ..pull::Config::default()
    }
}

fn durable_differences(found: &consumer::Config, wanted: &pull::Config) -> Vec<Difference> {
    let name = wanted.durable_name.clone().unwrap_or_default();
    let mut differences = Differences::of(format!("consumer {name}"));
    differences.compare("filter_subject", &found.filter_subject, &wanted.filter_subject);
    differences.compare("ack_policy", &found.ack_policy, &wanted.ack_policy);
    differences.compare("ack_wait", &found.ack_wait, &wanted.ack_wait);
    differences.compare("max_deliver", &found.max_deliver, &wanted.max_deliver);
    differences.compare("max_ack_pending", &found.max_ack_pending, &wanted.max_ack_pending);
    differences.list
}

struct Differences {
    of: String,
    list: Vec<Difference>,
}

impl Differences {
    const fn of(of: String) -> Self {
        Self { of, list: Vec::new() }
    }

    fn compare<T: PartialEq + std::fmt::Debug>(&mut self, setting: &'static str, found: &T, wanted: &T) {
        if found != wanted {
            self.list.push(Difference {
                of: self.of.clone(),
                setting,
                found: format!("{found:?}"),
                wanted: format!("{wanted:?}"),
            });
        }
    }
}
