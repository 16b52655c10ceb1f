//! One run: the handler under a deadline and a token, then whatever its end asks for. `Begun → Output → Settled`.

use std::{fmt, panic::AssertUnwindSafe, sync::Arc, time::Duration};

use futures_util::FutureExt;
use shared::{
    backoff::Delays,
    failpoint,
    ids::{ConversationId, MessageId, RunId},
    settle::{self, Cause, Settled},
    sqlstate,
};
use sqlx::PgPool;

use crate::{
    begin::Begun,
    finish::{Finished, Output},
    finisher::Finisher,
    handler::{AnyHandler, HandlerError, Reply, Turn},
    leases::{Lease, Stopped},
    operations::Operations,
};

/// The longest reply, in bytes.
pub(crate) const MAX_REPLY_BYTES: usize = 1024 * 1024;
/// How long a handler may go on after its token fired before it is dropped.
const GRACE: Duration = Duration::from_millis(200);

/// What every run of a consumer shares.
pub(crate) struct Runner {
    pub(crate) handler: Arc<dyn AnyHandler>,
    pub(crate) pool: PgPool,
    pub(crate) finisher: Finisher,
}

/// How a handler ended.
enum End {
    Reply(Reply),
    Failed(Cause),
    Stopped(Stopped),
}

impl Runner {
    /// Runs one begun turn to its settlement.
    pub(crate) async fn run(&self, begun: Begun, lease: Lease, timeout: Duration) {
        let conversation = begun.conversation_id.clone();
        let (turn_id, run_id, attempt) = (begun.turn_id, begun.run_id, begun.attempt);
        let started = tokio::time::Instant::now();
        let end = self.handle(begun, &lease, timeout).await;
        let handled_ms = started.elapsed().as_millis();
        let settled = match end {
            End::Reply(reply) => self.finish(&conversation, run_id, reply, &lease).await,
            End::Failed(cause) => self.settle(&conversation, run_id, &cause, &lease).await,
            End::Stopped(reason) => self.stopped(&conversation, run_id, reason, &lease).await,
        };
        // Dropped only now: the lease is renewed until the outcome is committed.
        drop(lease);
        tracing::info!(conversation_id = %conversation, %turn_id, %run_id, attempt, handled_ms, outcome = %settled, "turn ended");
    }

    async fn handle(&self, begun: Begun, lease: &Lease, timeout: Duration) -> End {
        if let Some(reason) = lease.stop.reason() {
            return End::Stopped(reason);
        }
        let token = lease.stop.token().child_token();
        let turn = Turn {
            operations: Operations::new(
                self.pool.clone(),
                begun.conversation_id.clone(),
                begun.turn_id,
                begun.run_id,
            ),
            turn_id: begun.turn_id,
            run_id: begun.run_id,
            attempt: begun.attempt,
            conversation_id: begun.conversation_id,
            agent: begun.agent,
            messages: begun.messages,
            trace_context: begun.trace_context,
            cancelled: token.clone(),
        };
        let handler = self.handler.clone();
        // A task of its own: a panic ends the task, not the consumer.
        let guarded = async move { AssertUnwindSafe(handler.answer(turn)).catch_unwind().await };
        let mut task = AbortOnDrop(tokio::spawn(guarded));
        let ended = tokio::select! {
            // A handler that ends because it was stopped has not failed, and what it says then is no reply.
            biased;
            () = lease.stop.token().cancelled() => {
                token.cancel();
                let _ = tokio::time::timeout(GRACE, &mut task.0).await;
                return End::Stopped(lease.stop.reason().unwrap_or(Stopped::LeaseLost));
            }
            ended = &mut task.0 => ended,
            () = tokio::time::sleep(timeout) => {
                token.cancel();
                let _ = tokio::time::timeout(GRACE, &mut task.0).await;
                return End::Failed(Cause::Timeout);
            }
        };
        match ended {
            Ok(Ok(Ok(reply))) => check(reply),
            Ok(Ok(Err(error))) if error.rejected_content => {
                End::Failed(Cause::RejectedContent { rule: error.message })
            }
            Ok(Ok(Err(HandlerError { message, retryable, retry_after, .. }))) => {
                End::Failed(Cause::Handler { message, retryable, retry_after })
            }
            Ok(Err(_panic)) => End::Failed(Cause::Handler {
                message: "the handler panicked".into(),
                retryable: true,
                retry_after: None,
            }),
            Err(_aborted) => End::Stopped(Stopped::Leaving),
        }
    }

    async fn finish(
        &self,
        conversation: &ConversationId,
        run: RunId,
        reply: Reply,
        lease: &Lease,
    ) -> Outcome {
        let _ = failpoint::reach("before_finish").await;
        let output = Output {
            conversation_id: conversation.clone(),
            run_id: run,
            message_id: MessageId::fresh(),
            content: reply.content,
        };
        let finished = tokio::select! {
            finished = self.finisher.finish(output) => finished.unwrap_or(Finished::Fenced),
            // Whether the reply got in or not, nothing more is written for a lost run. The other reasons to stop do not
            // interrupt a commit.
            () = lease_lost(lease) => return Outcome::LeaseLost,
        };
        let _ = failpoint::reach("after_finish").await;
        match finished {
            Finished::Done => Outcome::Done,
            Finished::Void => Outcome::Settled(Settled::Void),
            Finished::Gone => Outcome::Settled(Settled::Gone),
            // A cancelled lane finishes as nothing else: the settle writes the cancellation. Any other lane refuses.
            Finished::Fenced | Finished::Busy => {
                self.settle(conversation, run, &Cause::Released, lease).await
            }
        }
    }

    async fn stopped(
        &self,
        conversation: &ConversationId,
        run: RunId,
        reason: Stopped,
        lease: &Lease,
    ) -> Outcome {
        match reason {
            // Whoever holds the lane now decides; nothing is written for a lost run.
            Stopped::LeaseLost => Outcome::LeaseLost,
            Stopped::Cancelled | Stopped::Leaving => {
                self.settle(conversation, run, &Cause::Released, lease).await
            }
        }
    }

    /// Settles, as often as it takes, while the lease lasts; after that recovery does.
    async fn settle(
        &self,
        conversation: &ConversationId,
        run: RunId,
        cause: &Cause,
        lease: &Lease,
    ) -> Outcome {
        let mut delays = Delays::new(Duration::from_millis(50), Duration::from_secs(2));
        loop {
            match settle::settle(&self.pool, conversation, run, cause).await {
                Ok(settled) => return Outcome::Settled(settled),
                Err(error) => {
                    tracing::warn!(run_id = %run, error = sqlstate::safe_text(&error), "settle failed; trying again");
                }
            }
            tokio::select! {
                () = tokio::time::sleep(delays.next()) => {}
                () = lease_lost(lease) => return Outcome::LeaseLost,
            }
        }
    }
}

/// How a run ended, for the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Done,
    Settled(Settled),
    LeaseLost,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done => f.write_str("answered"),
            Self::Settled(settled) => settled.fmt(f),
            Self::LeaseLost => f.write_str("left to recovery: its lease is lost"),
        }
    }
}

async fn lease_lost(lease: &Lease) {
    lease.stop.token().cancelled().await;
    if lease.stop.reason() != Some(Stopped::LeaseLost) {
        std::future::pending::<()>().await;
    }
}

/// Cleans what Postgres would refuse, and refuses what is too large.
fn check(reply: Reply) -> End {
    if reply.content.len() > MAX_REPLY_BYTES {
        let rule = format!("a reply may have {MAX_REPLY_BYTES} bytes, this one has {}", reply.content.len());
        return End::Failed(Cause::RejectedContent { rule });
    }
    if reply.content.contains('\0') {
        return End::Reply(Reply::new(reply.content.replace('\0', "\u{fffd}")));
    }
    End::Reply(reply)
}

/// A handler that is not wanted any more is dropped at its next await.
struct AbortOnDrop<T>(tokio::task::JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}
