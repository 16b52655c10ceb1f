//! `relay failed`: the turns that failed and wait for somebody's decision, and all that is known of one. Never content.

use std::io::Write;

use serde::Serialize;
use shared::{
    ids::{AgentName, TurnId},
    settings::{self, DatabaseArgs},
    settle::Kind,
};
use sqlx::{Connection as _, PgConnection};

use self::{
    turn::{AttemptRow, OperationRow, TurnRow},
    walk::{FailedTurn, Order, Wanted},
};
use super::{CommandError, connect, output, turn_id};

mod turn;
pub(super) mod walk;

/// What the user is told (`messages.error.retryable`), in an operator's words. Neither forbids a person's retry.
const RETRYABLE: &str = "true: the same again may succeed";
const NOT_RETRYABLE: &str =
    "false: the same again would fail, or may repeat a side effect; mend the cause first";
/// Characters of an id, a name or an operator's message that are shown.
const SHOWN: usize = 200;

#[derive(Debug, clap::Args)]
pub(super) struct FailedArgs {
    #[command(subcommand)]
    command: FailedCommand,
}

#[derive(Debug, clap::Subcommand)]
enum FailedCommand {
    /// Show the turns that are failed now, the newest first.
    List {
        #[command(flatten)]
        wanted: WantedArgs,
        /// Turns that are shown, at most: 1 to 100000.
        #[arg(long, value_name = "N", default_value_t = 20, value_parser = settings::number(1..=100_000_u32))]
        limit: u32,
        /// Print JSON.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        database: DatabaseArgs,
    },
    /// Show why one turn failed: its attempts and its operations, but nothing that anybody said.
    Show {
        /// The turn, as `relay failed list` names it.
        #[arg(value_parser = turn_id)]
        turn: TurnId,
        /// Print JSON.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        database: DatabaseArgs,
    },
}

/// Which failed turns a command is about.
#[derive(Debug, clap::Args)]
pub(super) struct WantedArgs {
    /// Only turns of this agent.
    #[arg(long, value_name = "NAME")]
    agent: Option<AgentName>,
    /// Only turns that failed for this reason: handler, timeout, crash, `rejected_content`, `side_effect_unknown`,
    /// interrupted or cancelled.
    #[arg(long, value_name = "KIND", value_parser = kind)]
    kind: Option<Kind>,
}

impl WantedArgs {
    pub(super) fn wanted(&self) -> Wanted {
        Wanted { agent: self.agent.clone(), kind: self.kind }
    }
}

fn kind(text: &str) -> Result<Kind, String> {
    let known = Kind::ALL.map(Kind::as_str);
    Kind::ALL
        .into_iter()
        .find(|kind| kind.as_str() == text)
        .ok_or_else(|| format!("must be one of {}", known.join(", ")))
}

#[derive(Debug, Serialize)]
struct TurnPage {
    #[serde(flatten)]
    turn: TurnRow,
    attempts: Vec<AttemptRow>,
    operations: Vec<OperationRow>,
}

pub(super) async fn run(args: FailedArgs, out: &mut dyn Write) -> Result<(), CommandError> {
    match args.command {
        FailedCommand::List { wanted, limit, json, database } => {
            let pool = connect(&database, "relay failed").await?;
            let failed = list(&mut *pool.acquire().await?, &wanted.wanted(), limit).await?;
            if json { Ok(output::json(out, &failed)?) } else { print_list(out, &failed) }
        }
        FailedCommand::Show { turn, json, database } => {
            let pool = connect(&database, "relay failed").await?;
            let Some(page) = show(&mut *pool.acquire().await?, turn).await? else {
                return Err(CommandError::no_turn(turn));
            };
            if json { Ok(output::json(out, &page)?) } else { print_page(out, &page) }
        }
    }
}

/// Goes through the errors page by page until there are enough: many may not be failed any more.
async fn list(
    connection: &mut PgConnection,
    wanted: &Wanted,
    limit: u32,
) -> Result<Vec<FailedTurn>, CommandError> {
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let (mut found, mut place, mut last) = (Vec::new(), None, false);
    while !last && found.len() < limit {
        let mut transaction = connection.begin().await?;
        let (page, is_last) = walk::next(&mut transaction, wanted, Order::NewestFirst, &mut place).await?;
        transaction.commit().await?;
        found.extend(page);
        last = is_last;
    }
    found.truncate(limit);
    Ok(found)
}

async fn show(connection: &mut PgConnection, turn: TurnId) -> Result<Option<TurnPage>, CommandError> {
    let mut transaction = connection.begin().await?;
    let Some(turn) = turn::turn(&mut transaction, turn).await? else { return Ok(None) };
    let attempts = turn::attempts(&mut transaction, turn.turn_id).await?;
    let operations = turn::operations(&mut transaction, &turn.conversation_id, turn.turn_id).await?;
    transaction.commit().await?;
    Ok(Some(TurnPage { turn, attempts, operations }))
}

fn print_list(out: &mut dyn Write, failed: &[FailedTurn]) -> Result<(), CommandError> {
    if failed.is_empty() {
        return Ok(writeln!(out, "no turn is failed")?);
    }
    let rows: Vec<[String; 7]> = failed
        .iter()
        .map(|turn| {
            [
                turn.turn_id.to_string(),
                output::age(turn.age_seconds),
                turn.kind.clone().unwrap_or_default(),
                turn.attempts.map_or_else(String::new, |attempts| attempts.to_string()),
                turn.agent.clone(),
                if turn.needs_confirmation { "confirm" } else { "yes" }.to_owned(),
                output::shown(&turn.conversation_id, SHOWN),
            ]
        })
        .collect();
    Ok(output::table(out, ["turn", "age", "kind", "attempts", "agent", "retry", "conversation"], &rows)?)
}

fn print_page(out: &mut dyn Write, page: &TurnPage) -> Result<(), CommandError> {
    let turn = &page.turn;
    writeln!(out, "turn          {}", turn.turn_id)?;
    writeln!(out, "conversation  {}", output::shown(&turn.conversation_id, SHOWN))?;
    writeln!(out, "agent         {}", turn.agent)?;
    let meaning = if turn.state == "over" { ": retried, pruned, or its messages are deleted" } else { "" };
    writeln!(out, "state         {}{meaning}", turn.state)?;
    writeln!(out, "messages      {}", turn.messages)?;
    if let Some(seconds) = turn.age_seconds {
        writeln!(out, "ended         {} ago", output::age(seconds))?;
    }
    if let Some(error) = &turn.error {
        let field = |name: &str| error[name].as_str().map_or_else(|| error[name].to_string(), str::to_owned);
        let exhausted = if error["exhausted"] == true { ": all that its agent allows" } else { "" };
        writeln!(out, "kind          {}", output::shown(&field("kind"), SHOWN))?;
        writeln!(out, "attempts      {}{exhausted}", field("attempts"))?;
        writeln!(
            out,
            "retryable     {}",
            if error["retryable"] == true { RETRYABLE } else { NOT_RETRYABLE }
        )?;
    }
    if turn.state == "failed" {
        let confirm = "--confirm-side-effects: one may have happened, see below, and may then happen twice";
        let how = if turn.needs_confirmation { confirm } else { "" };
        writeln!(out, "retry         {}", format!("relay retry {} {how}", turn.turn_id).trim_end())?;
    } else {
        writeln!(out, "retry         nothing to retry: the turn is not failed")?;
    }
    if !page.attempts.is_empty() {
        writeln!(out)?;
        let rows: Vec<_> = page.attempts.iter().map(attempt_cells).collect();
        output::table(
            out,
            ["attempt", "run", "outcome", "ended", "waited", "took", "worker", "error"],
            &rows,
        )?;
    }
    if !page.operations.is_empty() {
        writeln!(out)?;
        let rows: Vec<_> = page.operations.iter().map(operation_cells).collect();
        output::table(out, ["operation", "name", "effect", "status", "started", "took", "run"], &rows)?;
    }
    Ok(())
}

fn attempt_cells(attempt: &AttemptRow) -> [String; 8] {
    let text = |name: &str| attempt.error.as_ref().and_then(|error| error[name].as_str());
    let error = [text("kind"), text("message")].into_iter().flatten().collect::<Vec<_>>().join(": ");
    [
        attempt.attempt.to_string(),
        attempt.run_id.to_string(),
        attempt.outcome.clone(),
        format!("{} ago", output::age(attempt.age_seconds)),
        output::age(attempt.waited_seconds),
        attempt.took_seconds.map_or_else(|| "-".to_owned(), output::age),
        attempt.worker.as_deref().map_or_else(|| "-".to_owned(), |worker| output::shown(worker, SHOWN)),
        output::shown(&error, SHOWN),
    ]
}

fn operation_cells(operation: &OperationRow) -> [String; 7] {
    [
        operation.operation_id.to_string(),
        output::shown(&operation.name, SHOWN),
        operation.effect.clone(),
        operation.status.clone(),
        format!("{} ago", output::age(operation.age_seconds)),
        operation.took_seconds.map_or_else(|| "-".to_owned(), output::age),
        operation.run_id.to_string(),
    ]
}
