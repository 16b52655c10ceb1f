//! One conversation: what it does, what it waits for, and the beginnings of what was said.

use std::io::Write;

use serde::Serialize;
use shared::ids::{ConversationId, TurnId};
use sqlx::PgConnection;

use super::{
    super::{CommandError, output},
    SHOWN,
    sql::{self, Conversation, MessageRow, RunRow},
    waits,
};

#[derive(Debug, Serialize)]
pub(super) struct Page {
    #[serde(flatten)]
    status: Conversation,
    waits_for: Option<String>,
    /// The turn that ended last, as far as messages and runs of this page tell.
    last_turn_id: Option<TurnId>,
    messages: Vec<MessageRow>,
    runs: Vec<RunRow>,
}

pub(super) async fn read(
    connection: &mut PgConnection,
    id: &ConversationId,
    last: i64,
) -> Result<Option<Page>, CommandError> {
    let Some(status) = sql::conversation(connection, id).await? else { return Ok(None) };
    // One more than is shown, so that what was cut off shows as cut off.
    let characters = i32::try_from(SHOWN + 1).unwrap_or(i32::MAX);
    let mut messages = sql::messages(connection, id, last, characters).await?;
    messages.reverse();
    let mut runs = sql::runs(connection, id, last).await?;
    runs.reverse();
    let waits_for = waits::waits_for(&status);
    let outcome = messages.iter().rev().find_map(|message| message.turn_id);
    let last_turn_id = outcome.or_else(|| runs.last().map(|run| run.turn_id));
    Ok(Some(Page { status, waits_for, last_turn_id, messages, runs }))
}

impl Page {
    pub(super) fn print(&self, out: &mut dyn Write) -> Result<(), CommandError> {
        let status = &self.status;
        let attempt =
            if status.attempt > 0 { format!(", attempt {}", status.attempt) } else { String::new() };
        let cancel = if status.cancel_requested { ", cancel requested" } else { "" };
        let since = output::age(status.for_seconds);
        let (turn, run) = (status.turn_id.map(|id| id.to_string()), status.run_id.map(|id| id.to_string()));
        let last_turn = self.last_turn_id.map(|id| id.to_string()).filter(|_| turn.is_none());
        let (look, when) = waits::next_look(status).unzip();
        let lines = [
            ("conversation", Some(status.id.clone())),
            ("agent", Some(format!("{}{}", status.agent, if status.paused { " (paused)" } else { "" }))),
            ("status", Some(format!("{} for {since}{attempt}{cancel}", status.status))),
            ("waits for", self.waits_for.clone()),
            ("turn", turn),
            ("last turn", last_turn),
            ("run", run),
            ("worker", status.worker.clone()),
            (look.unwrap_or_default(), when),
            ("messages", Some(format!("{}, unread {}", status.last_seq, status.unread_count))),
        ];
        for (name, value) in lines {
            if let Some(value) = value {
                writeln!(out, "{name:<13} {}", output::shown(&value, SHOWN))?;
            }
        }
        if !self.messages.is_empty() {
            writeln!(out)?;
            let rows: Vec<_> = self.messages.iter().map(message_cells).collect();
            output::table(out, ["seq", "age", "role", "id", "content"], &rows)?;
        }
        if !self.runs.is_empty() {
            writeln!(out)?;
            let rows: Vec<_> = self.runs.iter().map(run_cells).collect();
            output::table(out, ["turn", "attempt", "run", "outcome", "ended", "took", "worker"], &rows)?;
        }
        Ok(())
    }
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

fn run_cells(run: &RunRow) -> [String; 7] {
    let took = run.took_seconds.map_or_else(|| "-".to_owned(), output::age);
    let worker = run.worker.as_deref().map_or_else(|| "-".to_owned(), |worker| output::shown(worker, SHOWN));
    [
        run.turn_id.to_string(),
        run.attempt.to_string(),
        run.run_id.to_string(),
        run.outcome.clone(),
        format!("{} ago", output::age(run.age_seconds)),
        took,
        worker,
    ]
}
