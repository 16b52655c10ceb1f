//! `relay status`: what the pipeline does now, or what one conversation is waiting for.

use std::{collections::BTreeMap, io::Write};

use serde::Serialize;
use shared::{ids::ConversationId, settings::DatabaseArgs};
use sqlx::PgConnection;

use super::{
    CommandError, agent_sql, connect, output,
    status_sql::{self, Conversation, Due, MessageRow, RunRow},
};

/// Characters of a message that are shown.
const SHOWN: usize = 200;

#[derive(Debug, clap::Args)]
pub(super) struct StatusArgs {
    /// Show this conversation, with the beginnings of its messages; without one, the pipeline.
    conversation: Option<ConversationId>,
    /// Newest messages and runs of the conversation that are shown, at most.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=1000))]
    last: u16,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    database: DatabaseArgs,
}

/// The lanes of one agent that are not idle.
#[derive(Debug, Default, Serialize)]
struct AgentLanes {
    paused: bool,
    waiting: i64,
    retrying: i64,
    queued: i64,
    running: i64,
}

#[derive(Debug, Serialize)]
struct Pipeline {
    agents: BTreeMap<String, AgentLanes>,
    /// There are more lanes of a state than were counted.
    capped: bool,
    longest_due: Vec<Due>,
    asleep: Vec<String>,
}

#[derive(Debug, Serialize)]
struct ConversationPage {
    #[serde(flatten)]
    status: Conversation,
    messages: Vec<MessageRow>,
    runs: Vec<RunRow>,
}

pub(super) async fn run(args: StatusArgs, out: &mut dyn Write) -> Result<(), CommandError> {
    let pool = connect(&args.database, "relay status").await?;
    let mut connection = pool.acquire().await?;
    let Some(id) = args.conversation else {
        let pipeline = pipeline(&mut connection).await?;
        return if args.json { Ok(output::json(out, &pipeline)?) } else { print_pipeline(out, &pipeline) };
    };
    let Some(page) = conversation(&mut connection, &id, args.last.into()).await? else {
        return Err(CommandError::Unfinished(format!(
            "there is no conversation {}",
            output::shown(id.as_str(), SHOWN)
        )));
    };
    if args.json { Ok(output::json(out, &page)?) } else { print_conversation(out, &page) }
}

async fn pipeline(connection: &mut PgConnection) -> Result<Pipeline, CommandError> {
    let known = agent_sql::agents(connection).await?;
    let mut agents: BTreeMap<String, AgentLanes> = known
        .into_iter()
        .map(|agent| (agent.name, AgentLanes { paused: agent.paused, ..AgentLanes::default() }))
        .collect();
    for lanes in status_sql::lanes(connection).await? {
        let of_agent = agents.entry(lanes.agent).or_default();
        let count = match (lanes.state.as_str(), lanes.retrying) {
            ("waiting", false) => &mut of_agent.waiting,
            ("waiting", true) => &mut of_agent.retrying,
            ("queued", _) => &mut of_agent.queued,
            _ => &mut of_agent.running,
        };
        *count = lanes.count;
    }
    let total = |count: fn(&AgentLanes) -> i64| agents.values().map(count).sum::<i64>();
    let totals = [total(|of| of.waiting + of.retrying), total(|of| of.queued), total(|of| of.running)];
    Ok(Pipeline {
        capped: totals.contains(&status_sql::COUNTED),
        agents,
        longest_due: status_sql::longest_due(connection).await?,
        asleep: status_sql::asleep(connection).await?,
    })
}

async fn conversation(
    connection: &mut PgConnection,
    id: &ConversationId,
    last: i64,
) -> Result<Option<ConversationPage>, CommandError> {
    let Some(status) = status_sql::conversation(connection, id).await? else { return Ok(None) };
    // One more than is shown, so that what was cut off shows as cut off.
    let characters = i32::try_from(SHOWN + 1).unwrap_or(i32::MAX);
    let mut messages = status_sql::messages(connection, id, last, characters).await?;
    messages.reverse();
    let mut runs = status_sql::runs(connection, id, last).await?;
    runs.reverse();
    Ok(Some(ConversationPage { status, messages, runs }))
}

fn print_pipeline(out: &mut dyn Write, pipeline: &Pipeline) -> Result<(), CommandError> {
    let rows: Vec<[String; 6]> = pipeline
        .agents
        .iter()
        .map(|(name, lanes)| {
            let counts = [lanes.waiting, lanes.retrying, lanes.queued, lanes.running];
            let [waiting, retrying, queued, running] = counts.map(|count| count.to_string());
            let paused = if lanes.paused { "paused" } else { "" };
            [name.clone(), waiting, retrying, queued, running, paused.to_owned()]
        })
        .collect();
    output::table(out, ["agent", "waiting", "retrying", "queued", "running", ""], &rows)?;
    if pipeline.capped {
        writeln!(out, "(of each state only the {} lanes that are due first)", status_sql::COUNTED)?;
    }
    writeln!(out)?;
    if pipeline.longest_due.is_empty() {
        writeln!(out, "due     nothing")?;
    }
    for due in &pipeline.longest_due {
        let (age, conversation) = (output::age(due.for_seconds), output::shown(&due.conversation_id, SHOWN));
        writeln!(out, "due     {} for {age}: {conversation}", due.state)?;
    }
    let asleep = if pipeline.asleep.is_empty() { "nobody".to_owned() } else { pipeline.asleep.join(", ") };
    writeln!(out, "asleep  {}", output::shown(&asleep, 1000))?;
    Ok(())
}

fn print_conversation(out: &mut dyn Write, page: &ConversationPage) -> Result<(), CommandError> {
    let status = &page.status;
    let attempt = if status.attempt > 0 { format!(", attempt {}", status.attempt) } else { String::new() };
    let cancel = if status.cancel_requested { ", cancel requested" } else { "" };
    writeln!(out, "conversation  {}", output::shown(&status.id, SHOWN))?;
    writeln!(out, "agent         {}", status.agent)?;
    writeln!(
        out,
        "status        {} for {}{attempt}{cancel}",
        status.status,
        output::age(status.for_seconds)
    )?;
    let (turn, run) = (status.turn_id.map(|id| id.to_string()), status.run_id.map(|id| id.to_string()));
    for (name, value) in [("turn", &turn), ("run", &run), ("worker", &status.worker)] {
        if let Some(value) = value {
            writeln!(out, "{name:<13} {}", output::shown(value, SHOWN))?;
        }
    }
    match status.wake_in_seconds {
        Some(seconds) if seconds < 0.0 => writeln!(out, "due           for {}", output::age(-seconds))?,
        Some(seconds) => writeln!(out, "due           in {}", output::age(seconds))?,
        None => {}
    }
    writeln!(out, "messages      {}, unread {}", status.last_seq, status.unread_count)?;
    if !page.messages.is_empty() {
        writeln!(out)?;
        let rows: Vec<_> = page.messages.iter().map(message_cells).collect();
        output::table(out, ["seq", "age", "role", "id", "content"], &rows)?;
    }
    if !page.runs.is_empty() {
        writeln!(out)?;
        let rows: Vec<_> = page.runs.iter().map(run_cells).collect();
        output::table(out, ["run", "attempt", "outcome", "ended", "took", "worker"], &rows)?;
    }
    Ok(())
}

fn message_cells(message: &MessageRow) -> [String; 5] {
    let content =
        if message.deleted { "(deleted)".to_owned() } else { output::shown(&message.content, SHOWN) };
    [
        message.seq.to_string(),
        output::age(message.age_seconds),
        message.role.clone(),
        output::shown(&message.id, SHOWN),
        content,
    ]
}

fn run_cells(run: &RunRow) -> [String; 6] {
    let took = run.took_seconds.map_or_else(|| "-".to_owned(), output::age);
    let worker = run.worker.as_deref().map_or_else(|| "-".to_owned(), |worker| output::shown(worker, SHOWN));
    [
        run.run_id.to_string(),
        run.attempt.to_string(),
        run.outcome.clone(),
        output::age(run.age_seconds),
        took,
        worker,
    ]
}
