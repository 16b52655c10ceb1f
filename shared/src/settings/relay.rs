//! What belongs to one relay.

use std::time::Duration;

use super::{Checks, parse};

/// Flags and variables of [`RelaySettings`].
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Relay")]
pub struct RelayArgs {
    /// Name of this relay, its own among all that run [default: host and process id].
    #[arg(long, env = "RELAY_NAME", value_name = "NAME")]
    name: Option<String>,
    /// Lanes that one claim takes, 1 to 1000 [default: 100].
    #[arg(long, env = "RELAY_BATCH", value_name = "N")]
    batch: Option<String>,
    /// Triggers published and not yet acknowledged, 1 to 65536 [default: 1024].
    #[arg(long, env = "RELAY_MAX_IN_FLIGHT", value_name = "N")]
    max_in_flight: Option<String>,
    /// Longest sleep between two looks for work, 10ms to 1m [default: 1s].
    #[arg(long, env = "POLL_INTERVAL", value_name = "DURATION")]
    poll_interval: Option<String>,
    /// Time to finish what is in flight when told to stop, 0s to 1day [default: 10s].
    #[arg(long, env = "DRAIN_TIMEOUT", value_name = "DURATION")]
    drain_timeout: Option<String>,
}

/// One relay: its name and its pace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RelaySettings {
    /// The relay's name among all that run, as it sleeps and logs.
    pub name: String,
    /// Lanes that one claim takes, 1 to 1000.
    pub batch: u32,
    /// Bound of the triggers that are published and not yet acknowledged, 1 to 65536.
    pub max_in_flight: usize,
    /// The longest sleep between two looks for work, 10 ms to 60 s.
    pub poll_interval: Duration,
    /// Time between being told to stop and dropping what is still in flight.
    pub drain_timeout: Duration,
}

impl RelayArgs {
    /// Checks each setting against its range.
    pub fn check(&self, checks: &mut Checks) -> RelaySettings {
        RelaySettings {
            name: process_name(checks, ("RELAY_NAME", self.name.as_ref()), "relay"),
            batch: checks.or("RELAY_BATCH", self.batch.as_ref(), 100, parse::number(1..=1000)),
            max_in_flight: checks.or(
                "RELAY_MAX_IN_FLIGHT",
                self.max_in_flight.as_ref(),
                1024,
                parse::number(1..=65_536),
            ),
            poll_interval: poll_interval(checks, self.poll_interval.as_ref()),
            drain_timeout: drain_timeout(checks, self.drain_timeout.as_ref(), Duration::from_secs(10)),
        }
    }
}

/// The given name, or one that no other process of this host has.
pub(super) fn process_name(
    checks: &mut Checks,
    (setting, raw): (&'static str, Option<&String>),
    kind: &str,
) -> String {
    let host =
        std::env::var("HOSTNAME").ok().filter(|host| !host.is_empty() && parse::process_name(host).is_ok());
    let default = format!("{}-{}", host.as_deref().unwrap_or(kind), std::process::id());
    checks.or(setting, raw, default, parse::process_name)
}

pub(super) fn poll_interval(checks: &mut Checks, raw: Option<&String>) -> Duration {
    let range = Duration::from_millis(10)..=Duration::from_mins(1);
    checks.or("POLL_INTERVAL", raw, Duration::from_secs(1), parse::duration(range))
}

pub(super) fn drain_timeout(checks: &mut Checks, raw: Option<&String>, default: Duration) -> Duration {
    checks.or("DRAIN_TIMEOUT", raw, default, parse::duration(Duration::ZERO..=Duration::from_hours(24)))
}
