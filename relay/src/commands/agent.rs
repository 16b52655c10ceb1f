//! `relay agent`: the policy that all processes of an agent share, shown and changed.

use std::io::Write;

use shared::{ids::AgentName, process::UsageError, settings::DatabaseArgs};
use sqlx::{PgPool, postgres::types::PgInterval};

use super::{
    CommandError,
    agent_sql::{self, Agent, Change},
    connect, output,
};

const KEYS: &str = "\
Keys:
  debounce, max_wait, retry_backoff, retry_backoff_max,
  lease, turn_timeout, dispatch_timeout                  a duration, such as 500ms, 10s or 5m
  max_turn_messages, max_attempts, max_content_bytes     a number
  paused                                                 true or false";

#[derive(Debug, clap::Args)]
pub(super) struct AgentArgs {
    #[command(subcommand)]
    command: AgentCommand,
}

#[derive(Debug, clap::Subcommand)]
enum AgentCommand {
    /// Show every agent and its policy.
    List {
        /// Print JSON.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        database: DatabaseArgs,
    },
    /// Change an agent's policy, or make the agent. Running processes follow within seconds.
    #[command(after_help = KEYS)]
    Set {
        /// The agent: letters, digits, '_' and '-'.
        name: AgentName,
        /// What to change, as in lease=20s paused=true.
        #[arg(value_name = "KEY=VALUE")]
        changes: Vec<String>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        database: DatabaseArgs,
    },
}

pub(super) async fn run(args: AgentArgs, out: &mut dyn Write) -> Result<(), CommandError> {
    match args.command {
        AgentCommand::List { database, json } => {
            let pool = connect(&database, "relay agent").await?;
            let agents = agent_sql::agents(&mut *pool.acquire().await?).await?;
            print(out, &agents, json)
        }
        AgentCommand::Set { name, changes, database, json } => {
            let change = parse(&changes)?;
            let pool = connect(&database, "relay agent").await?;
            if let Err(error) = agent_sql::make_or_change(&pool, &name, &change).await {
                return Err(explain(&pool, error).await);
            }
            let agents = agent_sql::agents(&mut *pool.acquire().await?).await?;
            let changed: Vec<Agent> =
                agents.into_iter().filter(|agent| agent.name == name.as_str()).collect();
            print(out, &changed, json)
        }
    }
}

/// Reads every pair, and reports every pair that cannot be read.
fn parse(pairs: &[String]) -> Result<Change, UsageError> {
    let mut change = Change::default();
    let problems: Vec<String> = pairs.iter().filter_map(|pair| apply(&mut change, pair).err()).collect();
    if problems.is_empty() { Ok(change) } else { Err(UsageError(problems.join("\n"))) }
}

fn apply(change: &mut Change, pair: &str) -> Result<(), String> {
    let (key, value) = pair.split_once('=').ok_or_else(|| format!("{pair:?} is not KEY=VALUE"))?;
    match key {
        "debounce" => set(&mut change.debounce, key, interval(value)),
        "max_wait" => set(&mut change.max_wait, key, interval(value)),
        "max_turn_messages" => set(&mut change.max_turn_messages, key, number(value)),
        "max_attempts" => set(&mut change.max_attempts, key, number(value)),
        "retry_backoff" => set(&mut change.retry_backoff, key, interval(value)),
        "retry_backoff_max" => set(&mut change.retry_backoff_max, key, interval(value)),
        "lease" => set(&mut change.lease, key, interval(value)),
        "turn_timeout" => set(&mut change.turn_timeout, key, interval(value)),
        "dispatch_timeout" => set(&mut change.dispatch_timeout, key, interval(value)),
        "max_content_bytes" => set(&mut change.max_content_bytes, key, number(value)),
        "paused" => set(&mut change.paused, key, value.parse().map_err(|_| "must be true or false")),
        _ => Err(format!("{key:?} is no key of an agent: see relay agent set --help")),
    }
}

fn set<T>(slot: &mut Option<T>, key: &str, value: Result<T, &str>) -> Result<(), String> {
    let value = value.map_err(|what| format!("{key} {what}"))?;
    if slot.replace(value).is_some() { Err(format!("{key} is given twice")) } else { Ok(()) }
}

fn number(value: &str) -> Result<i32, &'static str> {
    value.parse().map_err(|_| "must be a whole number")
}

fn interval(value: &str) -> Result<PgInterval, &'static str> {
    let refused = "must be a duration such as 500ms, 10s or 5m";
    let duration = humantime::parse_duration(value).map_err(|_| refused)?;
    let microseconds = i64::try_from(duration.as_micros()).map_err(|_| refused)?;
    Ok(PgInterval { months: 0, days: 0, microseconds })
}

/// A value that a CHECK of the table refused is the user's mistake, and the CHECK says what would be right.
async fn explain(pool: &PgPool, error: sqlx::Error) -> CommandError {
    let constraint = error.as_database_error().and_then(|error| error.constraint()).map(str::to_owned);
    let Some(constraint) = constraint else { return error.into() };
    match agent_sql::rule(pool, &constraint).await {
        Ok(Some(rule)) => UsageError(format!("nothing was changed, since an agent must keep {rule}")).into(),
        Ok(None) => error.into(),
        Err(error) => error.into(),
    }
}

fn print(out: &mut dyn Write, agents: &[Agent], json: bool) -> Result<(), CommandError> {
    if json {
        return Ok(output::json(out, &agents)?);
    }
    for (position, agent) in agents.iter().enumerate() {
        if position > 0 {
            writeln!(out)?;
        }
        writeln!(out, "{}{}", agent.name, if agent.paused { "  (paused)" } else { "" })?;
        let lines = [
            ("debounce", agent.debounce.clone()),
            ("max_wait", agent.max_wait.clone()),
            ("max_turn_messages", agent.max_turn_messages.to_string()),
            ("max_attempts", agent.max_attempts.to_string()),
            ("retry_backoff", agent.retry_backoff.clone()),
            ("retry_backoff_max", agent.retry_backoff_max.clone()),
            ("lease", agent.lease.clone()),
            ("turn_timeout", agent.turn_timeout.clone()),
            ("dispatch_timeout", agent.dispatch_timeout.clone()),
            ("max_content_bytes", agent.max_content_bytes.to_string()),
        ];
        for (key, value) in lines {
            writeln!(out, "  {key:<18} {value}")?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_that_cannot_be_read_is_named_at_once() {
        let pairs = ["lease=20", "debounce", "leaze=1s", "paused=yes", "max_attempts=3", "max_attempts=4"];
        let error = parse(&pairs.map(str::to_owned)).unwrap_err();
        assert_eq!(error.0.lines().count(), 5, "{error}");
        for key in [
            "lease must be a duration",
            "\"debounce\"",
            "\"leaze\"",
            "paused must be",
            "max_attempts is given twice",
        ] {
            assert!(error.0.contains(key), "{key}: {error}");
        }
    }

    #[test]
    fn a_change_names_only_what_it_changes() {
        let change = parse(&["lease=1m 30s".to_owned(), "paused=true".to_owned()]).unwrap();
        assert_eq!(change.lease.unwrap().microseconds, 90_000_000);
        assert_eq!((change.paused, change.max_attempts), (Some(true), None));
    }
}
