//! `relay submit`: a user's message from the command line, or any number of them from a file.
//!
//! A long file passes through in constant memory: lines are read ahead by a few, committed in groups, and with `--wait`
//! no more than a window of them is unanswered before reading goes on.

use std::{
    io::{self, Read as _, Write},
    path::PathBuf,
    time::Duration,
};

use serde::Serialize;
use shared::{
    backoff::Delays,
    ids::{AgentName, ConversationId, MessageId},
    settings::{self, DatabaseArgs},
    submit::{Message, SubmitError, Submitted},
};
use sqlx::PgConnection;

pub(super) use self::group::Refused;
use self::{group::Create, sql::Outcome};

use super::{CommandError, connect, output};

mod file;
mod group;
mod line;
mod lines;
mod progress;
mod sql;
mod wait;

/// The largest content that any agent's policy allows, in bytes.
const MAX_CONTENT_BYTES: usize = 1 << 20;

/// Of 365.25 days.
const YEAR: Duration = Duration::from_hours(8766);

const FILES: &str = "\
Files:
  Each line is a JSON object of the texts conversation_id, content and, where wanted, message_id.
  A line that cannot be read or is refused is reported by its number on stderr, and the rest goes on;
  the exit code is then 1. Running it again submits what is missing and counts the rest as duplicates.
  That goes by message_id: a line without one gets a fresh id each time, and is submitted each time.";

#[derive(Debug, clap::Args)]
#[command(after_help = FILES)]
pub(super) struct SubmitArgs {
    /// Conversation that the message belongs to.
    #[arg(long, value_name = "ID", required_unless_present = "file")]
    conversation: Option<ConversationId>,
    /// Id of the message; submitted again with the same content it is a duplicate [default: a fresh one].
    #[arg(long, value_name = "ID")]
    message_id: Option<MessageId>,
    /// What the user says; without it, or with -, standard input, less one line break at its end.
    #[arg(value_name = "CONTENT")]
    content: Option<String>,
    /// Submit every line of a file, or with - of standard input: see below.
    #[arg(long, value_name = "PATH", conflicts_with_all = ["conversation", "message_id", "content"])]
    file: Option<PathBuf>,
    /// Make conversations that do not exist.
    #[arg(long)]
    create: bool,
    /// Agent of the conversations that are made; one that exists must have this agent [default: default, or its own].
    #[arg(long, value_name = "NAME", requires = "create")]
    agent: Option<AgentName>,
    /// Wait for the outcomes and print them as they are committed.
    #[arg(long)]
    wait: bool,
    /// With --wait: give up when nothing has been answered for this long, 1ms to 1year.
    #[arg(
        long,
        value_name = "DURATION",
        default_value = "10m",
        requires = "wait",
        value_parser = settings::duration(Duration::from_millis(1)..=YEAR)
    )]
    timeout: Duration,
    /// Print JSON: an object for each outcome, then one for the whole.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    database: DatabaseArgs,
}

impl SubmitArgs {
    /// How conversations are made, if any are to be made.
    fn create(&self) -> Option<Create> {
        self.create.then(|| Create {
            agent: self.agent.clone().unwrap_or_default(),
            is_asked_for: self.agent.is_some(),
        })
    }
}

pub(super) async fn run(args: SubmitArgs, out: &mut dyn Write) -> Result<(), CommandError> {
    match (&args.file, &args.conversation) {
        (Some(path), _) => file::run(&args, path, out).await,
        (None, Some(conversation)) => one(&args, conversation, out).await,
        (None, None) => Ok(()),
    }
}

/// What is printed of a single message.
#[derive(Serialize)]
struct Printed<'a> {
    conversation_id: &'a ConversationId,
    message_id: &'a MessageId,
    submitted: &'static str,
    #[serde(flatten)]
    outcome: Option<&'a Outcome>,
}

async fn one(
    args: &SubmitArgs,
    conversation: &ConversationId,
    out: &mut dyn Write,
) -> Result<(), CommandError> {
    let content = match args.content.as_deref() {
        None | Some("-") => content_of(io::stdin().lock())?,
        Some(content) => content.to_owned(),
    };
    let message = Message {
        conversation_id: conversation.clone(),
        message_id: args.message_id.clone().unwrap_or_else(MessageId::fresh),
        content,
        trace_context: None,
    };
    let pool = connect(&args.database, "relay submit").await?;
    let mut connection = pool.acquire().await?;
    let submitted = match group::submit_one(&mut connection, args.create().as_ref(), &message).await? {
        Submitted::Created => "created",
        Submitted::Duplicate => "duplicate",
    };
    let outcome =
        if args.wait { Some(outcome(&mut connection, &message, args.timeout).await?) } else { None };
    if args.json {
        let (conversation_id, message_id) = (conversation, &message.message_id);
        output::json(out, &Printed { conversation_id, message_id, submitted, outcome: outcome.as_ref() })?;
    }
    match outcome {
        None if !args.json => {
            Ok(writeln!(out, "{submitted} {}", output::shown(message.message_id.as_str(), 200))?)
        }
        Some(Outcome::Reply { content, .. }) if !args.json => Ok(writeln!(out, "{content}")?),
        None | Some(Outcome::Reply { .. }) => Ok(()),
        Some(Outcome::Error { turn_id, content, .. }) => Err(CommandError::Unfinished(format!(
            "turn {turn_id} failed: {} (`relay failed show {turn_id}` says why)",
            output::shown(&content, 2000)
        ))),
        Some(Outcome::Gone) => {
            Err(CommandError::Unfinished("the message was deleted before it was answered".to_owned()))
        }
    }
}

/// Standard input as a message: the line break that ends it belongs to the shell.
fn content_of(input: impl io::Read) -> Result<String, CommandError> {
    let mut content = String::new();
    // Two bytes for that line break, and one to tell what is too large.
    let limit = u64::try_from(MAX_CONTENT_BYTES + 3).unwrap_or(u64::MAX);
    input
        .take(limit)
        .read_to_string(&mut content)
        .map_err(|error| CommandError::Input("standard input".into(), error))?;
    let content =
        content.strip_suffix('\n').map_or(content.as_str(), |line| line.strip_suffix('\r').unwrap_or(line));
    if content.len() > MAX_CONTENT_BYTES {
        Err(Refused::from(SubmitError::ContentTooLarge).into())
    } else {
        Ok(content.to_owned())
    }
}

/// Looks at short, growing intervals until the message is answered.
async fn outcome(
    connection: &mut PgConnection,
    message: &Message,
    timeout: Duration,
) -> Result<Outcome, CommandError> {
    let looking = async {
        let mut delays = Delays::new(Duration::from_millis(5), Duration::from_millis(250));
        loop {
            let outcomes = sql::outcomes(connection, &[message.message_id.to_string()]).await?;
            if let Some(outcome) = outcomes.into_values().next() {
                return Ok(outcome);
            }
            tokio::time::sleep(delays.next()).await;
        }
    };
    tokio::time::timeout(timeout, looking).await.unwrap_or_else(|_| {
        let waited = humantime::format_duration(timeout);
        let conversation = output::shown(message.conversation_id.as_str(), 200);
        Err(CommandError::Unfinished(format!(
            "no outcome within {waited}; the message is submitted and will be answered: \
             `relay status {conversation}` says what it waits for"
        )))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_break_that_ends_standard_input_is_not_content() {
        assert_eq!(content_of("hello\r\n".as_bytes()).unwrap(), "hello");
        assert_eq!(content_of("two\n\n".as_bytes()).unwrap(), "two\n");
    }

    #[test]
    fn standard_input_is_read_no_further_than_a_message_may_be() {
        assert_eq!(content_of(io::repeat(b'a').take((1 << 20) as u64)).unwrap().len(), 1 << 20);
        let error = content_of(io::repeat(b'a')).unwrap_err();
        assert!(error.to_string().starts_with("content_too_large"), "{error}");
    }
}
