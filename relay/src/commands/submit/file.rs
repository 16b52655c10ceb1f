//! A file of messages: read ahead, submitted in groups, and with `--wait` answered in between.

use std::{
    io::{self, Write},
    path::Path,
    time::Duration,
};

use sqlx::PgConnection;
use tokio::{
    sync::mpsc,
    time::{self, MissedTickBehavior},
};

use super::{
    super::{CommandError, connect},
    SubmitArgs,
    group::{self, Numbered},
    lines::{self, Line},
    progress::Progress,
    wait::{Awaited, Waiting},
};

/// Messages of a full group.
const GROUP: usize = 500;
/// Bytes of content at which a group is full with fewer messages.
const GROUP_BYTES: usize = 4 << 20;
/// How long a group waits to become full, and how often outcomes are looked for.
const TICK: Duration = Duration::from_millis(50);

/// A submit under way.
struct Submit<'a> {
    args: &'a SubmitArgs,
    connection: &'a mut PgConnection,
    out: &'a mut dyn Write,
    group: Vec<Numbered>,
    group_bytes: usize,
    waiting: Waiting,
    progress: Progress,
}

pub(super) async fn run(args: &SubmitArgs, path: &Path, out: &mut dyn Write) -> Result<(), CommandError> {
    let broken = |error| CommandError::Input(path.display().to_string(), error);
    let input = lines::open(path).map_err(broken)?;
    let pool = connect(&args.database, "relay submit").await?;
    let mut connection = pool.acquire().await?;
    let mut submit = Submit {
        args,
        connection: &mut connection,
        out,
        group: Vec::with_capacity(GROUP),
        group_bytes: 0,
        waiting: Waiting::new(args.timeout),
        progress: Progress::new(input.bytes, args.wait, args.json),
    };
    let ended = submit.all(lines::read(input)).await;
    let unanswered = submit.waiting.len();
    let summed_up = submit.progress.finish(submit.out, unanswered);
    ended?.map_err(broken)?;
    summed_up
}

impl Submit<'_> {
    /// Takes lines until there are no more, and waits for the outcomes; returns how the input ended.
    async fn all(&mut self, mut lines: mpsc::Receiver<(u64, Line)>) -> Result<io::Result<()>, CommandError> {
        let mut tick = time::interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut end = None;
        while (end.is_none() || self.waiting.len() > 0) && !self.waiting.is_in_vain() {
            tokio::select! {
                next = lines.recv(), if end.is_none() && !self.waiting.is_full() => match next {
                    Some((offset, line)) => {
                        self.progress.read(offset);
                        end = self.line(line).await?;
                    }
                    None => end = Some(Ok(())),
                },
                _ = tick.tick() => {
                    self.group().await?;
                    self.look().await?;
                }
            }
            if end.is_some() {
                self.group().await?;
            }
        }
        Ok(end.unwrap_or(Ok(())))
    }

    /// Takes a line into the group, and submits the group once it is full. Returns the end, if this was it.
    async fn line(&mut self, line: Line) -> Result<Option<io::Result<()>>, CommandError> {
        match line {
            Line::Message { number, message } => {
                self.group_bytes += message.content.len();
                self.group.push(Numbered { number, message });
                if self.group.len() >= GROUP || self.group_bytes >= GROUP_BYTES {
                    self.group().await?;
                }
            }
            Line::Unreadable { number, why } => self.progress.unparsable(number, &why),
            Line::Broken(error) => return Ok(Some(Err(error))),
        }
        Ok(None)
    }

    async fn group(&mut self) -> Result<(), CommandError> {
        if self.group.is_empty() {
            return Ok(());
        }
        self.group_bytes = 0;
        let group = std::mem::replace(&mut self.group, Vec::with_capacity(GROUP));
        for (Numbered { number, message }, verdict) in
            group::submit(self.connection, self.args.create().as_ref(), group).await?
        {
            match verdict {
                Err(error) => self.progress.refused(number, &error),
                Ok(submitted) => {
                    self.progress.submitted(submitted);
                    if self.args.wait {
                        let (conversation_id, message_id) = (message.conversation_id, message.message_id);
                        self.waiting.push(Awaited { number, conversation_id, message_id });
                    }
                }
            }
        }
        Ok(())
    }

    async fn look(&mut self) -> Result<(), CommandError> {
        for (message, outcome) in self.waiting.look(self.connection).await? {
            self.progress.answered(self.out, &message, &outcome)?;
        }
        Ok(())
    }
}
