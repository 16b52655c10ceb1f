//! What belongs to one consumer, its handler apart.

use crate::ids::AgentName;
use std::time::Duration;

use super::{
    Checks, HandlerArgs, HandlerSettings, given, parse,
    relay::{drain_timeout, poll_interval, process_name},
};

/// Flags and variables of [`ConsumerSettings`].
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Consumer")]
pub struct ConsumerArgs {
    /// Name of this consumer, its own among all that run [default: host and process id].
    #[arg(long, env = "CONSUMER_NAME", value_name = "NAME")]
    name: Option<String>,
    /// Where turns come from: a relay by way of NATS, or Postgres alone [default: nats].
    #[arg(long, env = "SOURCE", value_name = "nats|postgres")]
    source: Option<String>,
    /// Agent that this consumer serves [default: default].
    #[arg(long, env = "AGENT", value_name = "NAME")]
    agent: Option<String>,
    /// Turns that run at once, 1 to 10000 [default: 64].
    #[arg(long, env = "CONCURRENCY", value_name = "N")]
    concurrency: Option<String>,
    /// Messages before the turn that the handler is shown, 0 to 10000 [default: 200].
    #[arg(long, env = "HISTORY_LIMIT", value_name = "N")]
    history_limit: Option<String>,
    /// Longest sleep between two looks for work, 10ms to 1m [default: 1s].
    #[arg(long, env = "POLL_INTERVAL", value_name = "DURATION")]
    poll_interval: Option<String>,
    /// Time to finish running turns when told to stop, 0s to 1day [default: 30s].
    #[arg(long, env = "DRAIN_TIMEOUT", value_name = "DURATION")]
    drain_timeout: Option<String>,
    #[command(flatten)]
    handler: HandlerArgs,
}

/// One consumer: its name, its agent, its pace and its handler.
#[derive(Debug, Clone, PartialEq)]
pub struct ConsumerSettings {
    /// The consumer's name among all that run: the `worker` of its runs.
    pub name: String,
    /// The name was given: it stands for this consumer also after a restart, which then takes back what it left.
    pub is_named: bool,
    /// Where turns come from.
    pub source: Source,
    /// The agent that it serves, a token of 1 to 64 of `[A-Za-z0-9_-]`.
    pub agent: AgentName,
    /// Turns that run at once, 1 to 10000.
    pub concurrency: usize,
    /// Time between being told to stop and giving back what still runs.
    pub drain_timeout: Duration,
    /// Messages before the turn that a handler is shown, at most; 0 to 10000.
    pub history_limit: u32,
    /// The longest sleep between two looks for work, 10 ms to 60 s.
    pub poll_interval: Duration,
    /// Who answers.
    pub handler: HandlerSettings,
}

/// Where a consumer's turns come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// Triggers that a relay published.
    Nats,
    /// Postgres itself: the consumer claims, without relay or broker.
    Postgres,
}

impl ConsumerArgs {
    /// Checks each setting against its range, and the handler's settings against each other.
    pub fn check(&self, checks: &mut Checks) -> ConsumerSettings {
        let sources = [("nats", Source::Nats), ("postgres", Source::Postgres)];
        ConsumerSettings {
            name: process_name(checks, ("CONSUMER_NAME", self.name.as_ref()), "consumer"),
            is_named: given(self.name.as_ref()).is_some(),
            source: checks.or("SOURCE", self.source.as_ref(), Source::Nats, parse::choice(&sources)),
            agent: checks.or("AGENT", self.agent.as_ref(), AgentName::default(), parse::agent),
            concurrency: checks.or("CONCURRENCY", self.concurrency.as_ref(), 64, parse::number(1..=10_000)),
            history_limit: checks.or(
                "HISTORY_LIMIT",
                self.history_limit.as_ref(),
                200,
                parse::number(0..=10_000),
            ),
            poll_interval: poll_interval(checks, self.poll_interval.as_ref()),
            drain_timeout: drain_timeout(checks, self.drain_timeout.as_ref(), Duration::from_secs(30)),
            handler: self.handler.check(checks),
        }
    }
}
