//! What is told of a long submit while it goes on, and at its end.

use std::{
    fmt::Display,
    io::{self, Write},
};

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use shared::{
    ids::{ConversationId, MessageId},
    submit::Submitted,
};

use super::{
    super::{CommandError, output},
    group::Refused,
    sql::Outcome,
    wait::Awaited,
};

/// Characters of an outcome that are shown to people.
const SHOWN: usize = 100;

/// The lines so far, counted by what became of them. A line is in one of the first four.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize)]
struct Tally {
    created: u64,
    duplicates: u64,
    refused: u64,
    unparsable: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    outcomes: Option<Outcomes>,
}

/// What `--wait` saw of the lines that were submitted.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize)]
struct Outcomes {
    replies: u64,
    errors: u64,
    gone: u64,
    unanswered: u64,
}

/// Counts, and shows: a bar on a terminal's stderr, lines with problems on stderr, outcomes on the command's output.
pub(super) struct Progress {
    bar: ProgressBar,
    tally: Tally,
    json: bool,
}

#[derive(Serialize)]
struct Answered<'a> {
    line: u64,
    conversation_id: &'a ConversationId,
    message_id: &'a MessageId,
    #[serde(flatten)]
    outcome: &'a Outcome,
}

impl Progress {
    /// Nothing yet, of an input with so many bytes.
    pub(super) fn new(bytes: Option<u64>, wait: bool, json: bool) -> Self {
        let template = "{bar:30} {percent}%  {msg}  {elapsed}, {eta} left";
        let bar = match (bytes, ProgressStyle::with_template(template)) {
            (Some(bytes), Ok(style)) => ProgressBar::new(bytes).with_style(style),
            _ => ProgressBar::new_spinner(),
        };
        Self { bar, tally: Tally { outcomes: wait.then(Outcomes::default), ..Tally::default() }, json }
    }

    /// The input was read so far.
    pub(super) fn read(&self, bytes: u64) {
        self.bar.set_position(bytes);
    }

    pub(super) fn submitted(&mut self, submitted: Submitted) {
        match submitted {
            Submitted::Created => self.tally.created += 1,
            Submitted::Duplicate => self.tally.duplicates += 1,
        }
        self.bar.set_message(format!("{} created, {} duplicates", self.tally.created, self.tally.duplicates));
    }

    pub(super) fn refused(&mut self, number: u64, error: &Refused) {
        self.tally.refused += 1;
        self.complain(number, error);
    }

    pub(super) fn unparsable(&mut self, number: u64, why: &impl Display) {
        self.tally.unparsable += 1;
        self.complain(number, why);
    }

    pub(super) fn answered(
        &mut self,
        out: &mut dyn Write,
        message: &Awaited,
        outcome: &Outcome,
    ) -> io::Result<()> {
        let outcomes = self.tally.outcomes.get_or_insert_default();
        let (count, word, content) = match outcome {
            Outcome::Reply { content, .. } => (&mut outcomes.replies, "reply".to_owned(), content.as_str()),
            Outcome::Error { turn_id, content, .. } => {
                (&mut outcomes.errors, format!("error of turn {turn_id}"), content.as_str())
            }
            Outcome::Gone => (&mut outcomes.gone, "gone".to_owned(), ""),
        };
        *count += 1;
        let Awaited { number, conversation_id, message_id } = message;
        self.bar.suspend(|| {
            if self.json {
                return output::json(out, &Answered { line: *number, conversation_id, message_id, outcome });
            }
            let (id, content) = (output::shown(message_id.as_str(), SHOWN), output::shown(content, SHOWN));
            writeln!(out, "line {number}  {id}  {word}  {content}")
        })
    }

    /// Prints the sum of it.
    ///
    /// # Errors
    ///
    /// When a line was not submitted, or not answered.
    pub(super) fn finish(mut self, out: &mut dyn Write, unanswered: usize) -> Result<(), CommandError> {
        self.bar.finish_and_clear();
        if let Some(outcomes) = &mut self.tally.outcomes {
            outcomes.unanswered = unanswered as u64;
        }
        let Tally { created, duplicates, refused, unparsable, outcomes } = &self.tally;
        if self.json {
            output::json(out, &self.tally)?;
        } else {
            writeln!(
                out,
                "created {created}, duplicates {duplicates}, refused {refused}, unparsable {unparsable}"
            )?;
            if let Some(Outcomes { replies, errors, gone, unanswered }) = outcomes {
                writeln!(out, "replies {replies}, errors {errors}, gone {gone}, unanswered {unanswered}")?;
            }
        }
        let not_submitted = refused + unparsable;
        let not_answered = outcomes.as_ref().map_or(0, |of| of.errors + of.gone + of.unanswered);
        if not_submitted + not_answered == 0 {
            return Ok(());
        }
        Err(CommandError::Unfinished(format!(
            "lines that were not submitted: {not_submitted}; messages without a reply: {not_answered}"
        )))
    }

    /// Nobody is left to tell when stderr is closed, and the count stands anyway.
    fn complain(&self, number: u64, why: &dyn Display) {
        let _ = self.bar.suspend(|| writeln!(io::stderr(), "line {number}: {why}"));
    }
}
