//! `relay agent`: the policy that all processes of an agent share, shown and changed.

use std::io::Write;

use serde::Serialize;
use shared::{ids::AgentName, process::UsageError, settings::DatabaseArgs};

use self::sql::{Agent, Change};
use super::{CommandError, connect, output};

mod change;
pub(super) mod sql;

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
    #[command(after_help = change::keys())]
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

/// What `agent set` did, and the policy that holds now.
#[derive(Debug, Serialize)]
struct Set {
    outcome: &'static str,
    #[serde(flatten)]
    agent: Agent,
}

pub(super) async fn run(args: AgentArgs, out: &mut dyn Write) -> Result<(), CommandError> {
    match args.command {
        AgentCommand::List { database, json } => {
            let pool = connect(&database, "relay agent").await?;
            let agents = sql::agents(&mut *pool.acquire().await?).await?;
            if json { Ok(output::json(out, &agents)?) } else { print_list(out, &agents) }
        }
        AgentCommand::Set { name, changes, database, json } => {
            let (change, problems) = change::parse(&changes);
            let set = set(&database, &name, &change, problems).await?;
            if json {
                return Ok(output::json(out, &set)?);
            }
            write!(out, "{} ", set.outcome)?;
            print(out, &set.agent)
        }
    }
}

/// Changes the agent unless there is a problem, those of the arguments included: then all of them are told at once. What
/// only the present policy shows is left out where the database cannot be asked.
async fn set(
    database: &DatabaseArgs,
    name: &AgentName,
    change: &Change,
    mut problems: Vec<String>,
) -> Result<Set, CommandError> {
    let refused = |problems: Vec<String>| {
        UsageError(format!("nothing was changed:\n  {}", problems.join("\n  "))).into()
    };
    let pool = match connect(database, "relay agent").await {
        Err(_) if !problems.is_empty() => return Err(refused(problems)),
        pool => pool?,
    };
    let mut transaction = pool.begin().await?;
    let is_new = sql::make(&mut transaction, name).await?;
    let before = sql::lock(&mut transaction, name).await?;
    problems.extend(change::contradictions(&change.applied_to(&before)));
    if !problems.is_empty() {
        transaction.rollback().await?;
        return Err(refused(problems));
    }
    sql::change(&mut transaction, name, change).await?;
    let agent = sql::lock(&mut transaction, name).await?;
    transaction.commit().await?;
    let outcome = match () {
        () if is_new => "created",
        () if agent == before => "unchanged",
        () => "changed",
    };
    Ok(Set { outcome, agent })
}

fn print_list(out: &mut dyn Write, agents: &[Agent]) -> Result<(), CommandError> {
    for (position, agent) in agents.iter().enumerate() {
        if position > 0 {
            writeln!(out)?;
        }
        print(out, agent)?;
    }
    Ok(())
}

fn print(out: &mut dyn Write, agent: &Agent) -> Result<(), CommandError> {
    writeln!(out, "{}{}", agent.name, if agent.paused { "  (paused)" } else { "" })?;
    let lines = [
        ("debounce", agent.debounce.to_string()),
        ("max_wait", agent.max_wait.to_string()),
        ("max_turn_messages", agent.max_turn_messages.to_string()),
        ("max_attempts", agent.max_attempts.to_string()),
        ("retry_backoff", agent.retry_backoff.to_string()),
        ("retry_backoff_max", agent.retry_backoff_max.to_string()),
        ("lease", agent.lease.to_string()),
        ("turn_timeout", agent.turn_timeout.to_string()),
        ("dispatch_timeout", agent.dispatch_timeout.to_string()),
        ("max_content_bytes", agent.max_content_bytes.to_string()),
    ];
    for (key, value) in lines {
        writeln!(out, "  {key:<18} {value}")?;
    }
    Ok(())
}
