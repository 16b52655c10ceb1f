//! The port: what runs a turn. Everything else in this crate exists so that a handler may take minutes, fail, panic or
//! outlive its lease without a turn being lost or doubled.

use std::{sync::Arc, time::Duration};

use futures_util::future::BoxFuture;
use shared::{
    ids::{AgentName, ConversationId, MessageId, RunId, TurnId},
    state::Role,
};
use tokio_util::sync::CancellationToken;

use crate::operations::Operations;

/// Runs turns. Called for many turns at once.
///
/// A handler may run more than once for one turn, after a failure or a lost lease, never at the same time. It should end
/// soon after [`Turn::cancelled`] fires; it is dropped at its next await in any case. A panic fails the attempt.
pub trait TurnHandler: Send + Sync + 'static {
    /// Answers one turn.
    fn handle(&self, turn: Turn) -> impl Future<Output = Result<Reply, HandlerError>> + Send;
}

impl<H: TurnHandler> TurnHandler for Arc<H> {
    fn handle(&self, turn: Turn) -> impl Future<Output = Result<Reply, HandlerError>> + Send {
        H::handle(self, turn)
    }
}

/// A handler behind one type: the pipeline is compiled once, and not for every handler.
pub(crate) trait AnyHandler: Send + Sync {
    /// Answers one turn.
    fn answer(&self, turn: Turn) -> BoxFuture<'_, Result<Reply, HandlerError>>;
}

impl<H: TurnHandler> AnyHandler for H {
    fn answer(&self, turn: Turn) -> BoxFuture<'_, Result<Reply, HandlerError>> {
        Box::pin(self.handle(turn))
    }
}

/// A handler made of an async function.
pub fn handler_fn<F, A>(answer: F) -> impl TurnHandler
where
    F: Fn(Turn) -> A + Send + Sync + 'static,
    A: Future<Output = Result<Reply, HandlerError>> + Send,
{
    struct Function<F>(F);

    impl<F, A> TurnHandler for Function<F>
    where
        F: Fn(Turn) -> A + Send + Sync + 'static,
        A: Future<Output = Result<Reply, HandlerError>> + Send,
    {
        fn handle(&self, turn: Turn) -> impl Future<Output = Result<Reply, HandlerError>> + Send {
            (self.0)(turn)
        }
    }

    Function(answer)
}

/// One attempt at a turn, as a handler gets it.
#[derive(Debug, Clone)]
pub struct Turn {
    /// The turn: equal across attempts.
    pub turn_id: TurnId,
    /// This attempt.
    pub run_id: RunId,
    /// Which attempt it is, from 1.
    pub attempt: i32,
    /// The conversation.
    pub conversation_id: ConversationId,
    /// The agent.
    pub agent: AgentName,
    /// The history, then the turn's own messages: ordered by turn, a turn's messages before its outcome.
    pub messages: Arc<[TurnMessage]>,
    /// The producer's W3C `traceparent`.
    pub trace_context: Option<String>,
    /// Records tool calls, each before it is made.
    pub operations: Operations,
    /// Fires when the run has lost its lane, the user cancelled, the deadline passed or the process is leaving.
    pub cancelled: CancellationToken,
}

/// One message of the conversation.
#[derive(Clone, PartialEq, Eq)]
pub struct TurnMessage {
    /// Its id.
    pub id: MessageId,
    /// Its place in the conversation.
    pub seq: i64,
    /// Who said it.
    pub role: Role,
    /// What was said.
    pub content: String,
    /// It is one of those to be answered now.
    pub in_turn: bool,
}

/// Content stays out of logs, `{:?}` included.
impl std::fmt::Debug for TurnMessage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { id, seq, role, content, in_turn } = self;
        write!(f, "TurnMessage({id:?}, seq {seq}, {role}, {} bytes, in_turn {in_turn})", content.len())
    }
}

/// What the user will read.
#[derive(Clone, PartialEq, Eq)]
pub struct Reply {
    /// The text: at most 1 MiB; NUL is replaced by U+FFFD.
    pub content: String,
}

impl Reply {
    /// A reply of this text.
    #[must_use]
    pub fn new(content: impl Into<String>) -> Self {
        Self { content: content.into() }
    }
}

impl std::fmt::Debug for Reply {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Reply({} bytes)", self.content.len())
    }
}

/// Why a handler has no reply. The message is kept with the run for operators; the user reads a text of our own.
#[derive(Clone, thiserror::Error)]
#[error("the handler failed{}", if *.retryable { "" } else { " for good" })]
pub struct HandlerError {
    /// What happened. Never logged: a provider's error may quote the conversation.
    pub message: String,
    /// False: another attempt would fail too.
    pub retryable: bool,
    /// The next attempt should wait at least this long.
    pub retry_after: Option<Duration>,
    /// There is an answer, and it cannot be stored: the user is told that. The message then says which rule it breaks,
    /// and quotes nothing.
    pub rejected_content: bool,
}

impl HandlerError {
    /// A failure that another attempt may mend.
    #[must_use]
    pub fn retryable(message: impl Into<String>) -> Self {
        Self { message: message.into(), retryable: true, retry_after: None, rejected_content: false }
    }

    /// A failure that every attempt would meet.
    #[must_use]
    pub fn fatal(message: impl Into<String>) -> Self {
        Self { retryable: false, ..Self::retryable(message) }
    }

    /// An answer that cannot be stored, whoever tries again; `rule` says why, without quoting it.
    #[must_use]
    pub fn rejected(rule: impl Into<String>) -> Self {
        Self { rejected_content: true, ..Self::fatal(rule) }
    }

    /// Asks for a longer wait before the next attempt.
    #[must_use]
    pub const fn after(mut self, wait: Duration) -> Self {
        self.retry_after = Some(wait);
        self
    }
}

impl std::fmt::Debug for HandlerError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HandlerError(retryable {}, {} bytes)", self.retryable, self.message.len())
    }
}
