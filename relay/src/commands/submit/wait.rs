//! Messages that were submitted and are not answered yet: a bounded number of them, looked up a few at a time.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use shared::ids::{ConversationId, MessageId};
use sqlx::PgConnection;

use super::sql::{self, Outcome};

/// Unanswered messages at which no more are submitted.
const WINDOW: usize = 5_000;
/// Messages of one look.
const LOOK: usize = 1_000;
/// A look is followed by a pause of so many times what it took: whoever waits must not slow down what it waits for.
const PAUSE: u32 = 4;

/// A message without an outcome, and the line that it came from.
pub(super) struct Awaited {
    pub(super) number: u64,
    pub(super) conversation_id: ConversationId,
    pub(super) message_id: MessageId,
}

/// The messages without an outcome. Those that were looked up longest ago are looked up next.
pub(super) struct Waiting {
    messages: VecDeque<Awaited>,
    timeout: Duration,
    progress: Instant,
    next_look: Instant,
}

impl Waiting {
    /// Nothing yet; patient for `timeout` without any answer.
    pub(super) fn new(timeout: Duration) -> Self {
        Self { messages: VecDeque::new(), timeout, progress: Instant::now(), next_look: Instant::now() }
    }

    pub(super) fn push(&mut self, message: Awaited) {
        self.messages.push_back(message);
        self.progress = Instant::now();
    }

    pub(super) fn len(&self) -> usize {
        self.messages.len()
    }

    pub(super) fn is_full(&self) -> bool {
        self.messages.len() >= WINDOW
    }

    /// Nothing was submitted and nothing was answered for the whole timeout, although something should be.
    pub(super) fn is_in_vain(&self) -> bool {
        !self.messages.is_empty() && self.progress.elapsed() >= self.timeout
    }

    /// Takes out those that have an outcome by now, among the next few; none while the last look is too recent.
    pub(super) async fn look(
        &mut self,
        connection: &mut PgConnection,
    ) -> Result<Vec<(Awaited, Outcome)>, sqlx::Error> {
        let started = Instant::now();
        if started < self.next_look {
            return Ok(Vec::new());
        }
        let next: Vec<Awaited> = self.messages.drain(..self.messages.len().min(LOOK)).collect();
        if next.is_empty() {
            return Ok(Vec::new());
        }
        let ids: Vec<String> = next.iter().map(|message| message.message_id.to_string()).collect();
        let mut outcomes = sql::outcomes(connection, &ids).await?;
        self.next_look = Instant::now() + PAUSE * started.elapsed();
        let mut answered = Vec::new();
        for message in next {
            match outcomes.remove(message.message_id.as_str()) {
                Some(outcome) => answered.push((message, outcome)),
                None => self.messages.push_back(message),
            }
        }
        if !answered.is_empty() {
            self.progress = Instant::now();
        }
        Ok(answered)
    }
}
