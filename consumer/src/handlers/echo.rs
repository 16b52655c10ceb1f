//! The handler that says what it was told: for a first look at the pipeline without a model, and for load tests, where
//! its pace, its failures and the size of its replies are set.

use shared::{ids::RunId, settings::EchoSettings};
use uuid::Uuid;

use crate::handler::{HandlerError, Reply, Turn, TurnHandler};

/// The namespace in which a run's luck is drawn: a UUID of this project's own.
const LUCK: Uuid = Uuid::from_u128(0x3b0e_94d7_6a51_4f0c_9d28_c1f5_7e60_ab12);

/// Replies `echo: ` and the turn's own messages, a line each.
#[derive(Debug, Clone)]
pub struct EchoHandler {
    settings: EchoSettings,
}

impl EchoHandler {
    /// An echo with this pace, these failures and this size.
    #[must_use]
    pub const fn new(settings: EchoSettings) -> Self {
        Self { settings }
    }

    fn fails(&self, run: RunId) -> bool {
        luck(run) < self.settings.failure_rate
    }
}

impl TurnHandler for EchoHandler {
    async fn handle(&self, turn: Turn) -> Result<Reply, HandlerError> {
        let delay = tokio::time::sleep(self.settings.delay);
        if turn.cancelled.run_until_cancelled(delay).await.is_none() {
            return Err(HandlerError::retryable("the echo was stopped"));
        }
        if self.fails(turn.run_id) {
            return Err(HandlerError::retryable("the echo fails as often as ECHO_FAILURE_RATE says"));
        }
        let said = turn.messages.iter().filter(|message| message.in_turn);
        let said: Vec<&str> = said.map(|message| message.content.as_str()).collect();
        let echo = format!("echo: {}", said.join("\n"));
        Ok(Reply::new(match self.settings.reply_bytes {
            Some(bytes) => sized(echo, bytes),
            None => echo,
        }))
    }
}

/// A number from 0 to 1 that is the run's own: equal on every machine, so that a load test can be repeated and a retry,
/// being another run, can succeed.
fn luck(run: RunId) -> f64 {
    let hash = Uuid::new_v5(&LUCK, run.0.as_bytes());
    let [a, b, c, d, ..] = *hash.as_bytes();
    f64::from(u32::from_be_bytes([a, b, c, d])) / (f64::from(u32::MAX) + 1.0)
}

/// The text at exactly `bytes`: cut between characters, filled up with dots.
fn sized(mut text: String, bytes: usize) -> String {
    text.truncate(text.floor_char_boundary(bytes));
    let missing = bytes - text.len();
    text.extend(std::iter::repeat_n('.', missing));
    text
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::handlers::fixture;

    fn echo(settings: EchoSettings) -> EchoHandler {
        EchoHandler::new(settings)
    }

    fn plain() -> EchoSettings {
        EchoSettings { delay: Duration::ZERO, failure_rate: 0.0, reply_bytes: None }
    }

    #[tokio::test]
    async fn it_says_what_the_turn_says_and_nothing_of_the_history() {
        let reply = echo(plain()).handle(fixture::turn()).await.unwrap();
        assert_eq!(reply.content, "echo: Grüezi\nand more");
    }

    #[tokio::test]
    async fn a_reply_has_exactly_the_size_that_was_set() {
        // 9 bytes end within the ü.
        for bytes in [0, 1, 9, 10, 5000] {
            let echo = echo(EchoSettings { reply_bytes: Some(bytes), ..plain() });
            assert_eq!(echo.handle(fixture::turn()).await.unwrap().content.len(), bytes);
        }
    }

    #[tokio::test]
    async fn a_share_of_the_runs_fails_always_the_same_ones_and_retryably() {
        let half = echo(EchoSettings { failure_rate: 0.5, ..plain() });
        let runs: Vec<RunId> =
            (0..2000).map(|n| RunId(Uuid::new_v5(&Uuid::nil(), &u32::to_be_bytes(n)))).collect();
        let failing = runs.iter().filter(|run| half.fails(**run)).count();
        assert!((900..1100).contains(&failing), "{failing}");
        assert!(runs.iter().all(|run| half.fails(*run) == half.fails(*run)));
        assert!(!runs.iter().any(|run| echo(plain()).fails(*run)));
        let never = echo(EchoSettings { failure_rate: 1.0, ..plain() });
        assert!(runs.iter().all(|run| never.fails(*run)));
        assert!(never.handle(fixture::turn()).await.unwrap_err().retryable);
    }

    #[tokio::test]
    async fn a_long_delay_ends_when_the_turn_is_cancelled() {
        let slow = echo(EchoSettings { delay: Duration::from_hours(24), ..plain() });
        let turn = fixture::turn();
        turn.cancelled.cancel();
        let ended = tokio::time::timeout(Duration::from_secs(10), slow.handle(turn)).await.unwrap();
        assert!(ended.unwrap_err().retryable);
    }
}
